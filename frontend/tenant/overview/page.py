"""What stands around the overview's panels."""

from __future__ import annotations

from dataclasses import dataclass

from billing.metering.usage import UsageReport
from frontend.core.date_ranges import DateRange, span_of
from frontend.core.metering import Metering, metering
from frontend.core.page_context import PageContext
from millrace.conf.environment import platform_settings
from tenants.permissions import Permission


@dataclass(frozen=True)
class FirstRequest:
    """What to type to see something here."""

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
    span: DateRange
    metering: Metering
    suspended: bool
    first_request: FirstRequest | None  # only while there has been none
    export_url: str  # a CSV of the span's usage
    new_key_url: str
    playground_url: str


def head(visit: PageContext) -> OverviewHeader:
    """What stands above the panels."""
    seen = UsageReport(visit.tenant.pk).events().exists()
    first = None if seen else _first_request()
    csv = visit.link("usage-csv")
    export = f"{csv}?{visit.request.GET.urlencode()}" if csv and visit.query else csv
    return OverviewHeader(
        span_of(visit), metering(visit.now), visit.tenant.is_suspended, first, export, *_first_steps(visit)
    )


def _first_steps(visit: PageContext) -> tuple[str, str]:
    """Where to make a key, and where to try without one; empty for who may not."""
    if not visit.may(Permission.KEYS_WRITE):
        return "", ""
    return visit.link("keys-new"), visit.link("playground")


def _first_request() -> FirstRequest:
    settings = platform_settings()
    return FirstRequest(f"{settings.base_url}/v1", settings.models[0].name)
