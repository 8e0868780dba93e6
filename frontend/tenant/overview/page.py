"""The header of the overview."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.conf import settings

from billing.metering.usage import UsageReport
from frontend.core.date_ranges import date_range_of
from frontend.core.lists import with_query
from frontend.core.metering import metering
from frontend.core.page_context import PageContext


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


def header(ctx: PageContext) -> dict[str, Any]:
    """Return the header of the page. `first_request` is None after the first request."""
    seen = UsageReport(ctx.tenant.pk).events().exists()
    platform = settings.MILLRACE
    return {
        "date_range": date_range_of(ctx),
        "metering": metering(ctx.now),
        "first_request": None if seen else FirstRequest(f"{platform.base_url}/v1", platform.models[0].name),
        "export_url": with_query(ctx.url("usage-csv"), **ctx.query),
    }
