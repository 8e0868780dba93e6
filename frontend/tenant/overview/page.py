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
from inference_worker.contract.encoder_config import model_task
from millrace.apps.operations.deployments import served_specs


def header(ctx: PageContext) -> dict[str, Any]:
    """Return the header of the page. `code_examples` is empty after the first request."""
    seen = UsageReport(ctx.tenant.pk).events().exists()
    platform = settings.MILLRACE
    return {
        "date_range": date_range_of(ctx),
        "metering": metering(ctx.now),
        "code_examples": () if seen else code_examples(platform.base_url, _first_model()),
        "export_url": with_query(ctx.url("usage-csv"), **ctx.query),
    }


def _first_model() -> str:
    """Return a model that generates text, or the first of the settings if none is loaded."""
    names = (spec.name for spec in served_specs(wanted_loaded=True) if model_task(spec.source) == "generate")
    return next(names, settings.MILLRACE.models[0].name)
