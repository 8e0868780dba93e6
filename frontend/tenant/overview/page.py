"""The header of the overview."""

from __future__ import annotations

from typing import Any

from django.conf import settings

from billing.metering.usage import UsageReport
from frontend.core.date_ranges import date_range_of
from frontend.core.lists import with_query
from frontend.core.metering import metering
from frontend.core.page_context import PageContext
from frontend.tenant.overview.quick_start import code_examples
from millrace.apps.deployments.model_obstacles import example_model


def header(ctx: PageContext) -> dict[str, Any]:
    """Return the header of the page. `code_examples` is empty after the first request."""
    seen = UsageReport(ctx.tenant.pk).events().exists()
    platform = settings.MILLRACE
    return {
        "date_range": date_range_of(ctx),
        "metering": metering(ctx.now),
        "code_examples": () if seen else code_examples(platform.base_url, example_model(ctx.tenant.pk)),
        "export_url": with_query(ctx.url("usage-csv"), **ctx.query),
    }
