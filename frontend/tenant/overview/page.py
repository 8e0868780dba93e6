"""The header of the overview."""

from __future__ import annotations

from dataclasses import dataclass

from django.conf import settings

from billing.metering.usage import UsageReport
from frontend.core.date_ranges import DateRange, date_range_of
from frontend.core.metering import Metering, metering
from frontend.core.page_context import PageContext
from tenants.permissions import Permission


@dataclass(frozen=True)
class FirstRequest:
    """The examples for a first request."""

    base_url: str
    model: str

    @property
    def curl(self) -> str:
        return f"""curl {self.base_url}/chat/completions \\
  -H "Authorization: Bearer $MILLRACE_API_KEY" \\
  -H "Content-Type: application/json" \\
  -d '{{"model": "{self.model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'"""

    @property
    def python(self) -> str:
        return f"""import os

from openai import OpenAI

client = OpenAI(base_url="{self.base_url}", api_key=os.environ["MILLRACE_API_KEY"])
answer = client.chat.completions.create(
    model="{self.model}",
    messages=[{{"role": "user", "content": "Hello!"}}],
)
print(answer.choices[0].message.content)"""


@dataclass(frozen=True)
class OverviewHeader:
    date_range: DateRange
    metering: Metering
    suspended: bool
    first_request: FirstRequest | None  # None after the first request
    export_url: str  # CSV of the usage in the date range
    new_key_url: str
    playground_url: str


def header(ctx: PageContext) -> OverviewHeader:
    """Return the header of the page."""
    seen = UsageReport(ctx.tenant.pk).events().exists()
    first = None if seen else _first_request()
    csv = ctx.url("usage-csv")
    export = f"{csv}?{ctx.request.GET.urlencode()}" if csv and ctx.query else csv
    return OverviewHeader(
        date_range_of(ctx), metering(ctx.now), ctx.tenant.is_suspended, first, export, *_first_steps(ctx)
    )


def _first_steps(ctx: PageContext) -> tuple[str, str]:
    """Return the URLs for creating a key and for the playground; empty without permission."""
    if not ctx.may(Permission.KEYS_WRITE):
        return "", ""
    return ctx.url("keys-new"), ctx.url("playground")


def _first_request() -> FirstRequest:
    platform = settings.MILLRACE
    return FirstRequest(f"{platform.base_url}/v1", platform.models[0].name)
