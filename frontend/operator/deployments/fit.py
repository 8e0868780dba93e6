"""The fit check in the form of a deployment: whether the platform's machine can serve the model."""

from __future__ import annotations

from typing import Any

import redis
from django.http import HttpResponse
from django.template.loader import render_to_string
from django.urls import path
from django.utils.translation import gettext as _

from frontend.core.backend_messages import translate_message
from frontend.core.gauges import percent
from frontend.core.page_context import PageContext, operator_page
from frontend.operator.deployments.forms import DeploymentForm
from millrace.apps.deployments.fit_checks import do_start_fit_check, find_misfit, find_problems, read_fit_check
from tenants.actions import ActionRefused

_FIELDS = ("source", "dtype", "quantization", "kv_cache_dtype", "max_model_len", "kv_cache_memory")


@operator_page(methods=("POST",))
def start(ctx: PageContext) -> HttpResponse:
    form = DeploymentForm(ctx.request.POST)
    form.full_clean()
    if errors := [f"{form.fields[name].label}: {form.errors[name][0]}" for name in _FIELDS if name in form.errors]:
        return _fragment(ctx, error=" ".join(errors))
    options = {name: form.cleaned_data[name] for name in _FIELDS}
    try:
        return _fragment(ctx, check_id=do_start_fit_check(options.pop("source"), options))
    except ActionRefused as exc:
        return _fragment(ctx, error=translate_message(exc))


@operator_page()
def result(ctx: PageContext) -> HttpResponse:
    check_id = ctx.arguments["check_id"]
    try:
        found = read_fit_check(check_id)
    except redis.RedisError:
        found = {"state": "running"}
    if found is None:
        return _fragment(ctx, error=_("The check ended without a result. Try again."))
    if found["state"] == "running":
        return _fragment(ctx, check_id=check_id)
    if error := found.get("error"):
        return _fragment(ctx, error=translate_message(error))
    return _fragment(ctx, shown_check=check_id, **_view_model(found["report"], found.get("host", "")))


def require_fit(check_id: str, data: dict[str, Any]) -> None:
    """Require that the check that the form shows has not found that the model does not fit.

    Raises:
        ActionRefused: it does not fit.
    """
    if check_id and (reason := find_misfit(check_id, data["source"], data)):
        raise ActionRefused(_("%(reason)s. Tick “Force” to use it anyway.") % {"reason": reason.removesuffix(".")})


def _view_model(report: dict[str, Any], host: str) -> dict[str, Any]:
    """Return the report of `millrace models inspect` for the template. `host`: the machine that was measured."""
    checkpoint, fit, machine = report["checkpoint"], report["fit"] or {}, report["machine"] or {}
    values: list[tuple[str, str]] = [(_("Architecture"), checkpoint["architecture"] or "–")]
    for label, name, unit in (
        (_("Context"), "context", "tokens"),
        (_("Streams of that context"), "streams", ""),
        (_("One stream, at most"), "decode_tokens_per_second", "tokens/s"),
        (_("All streams, at most"), "batch_tokens_per_second", "tokens/s"),
    ):
        if fit.get(name) is not None:
            values.append((label, f"{fit[name]:,.0f} {unit}".strip()))
    return {
        "can_serve": report["can_serve"],
        "problems": find_problems(report),
        "values": values,
        "machine": " · ".join(filter(None, (machine.get("name", ""), host))),
        "memory": _memory(fit, machine),
    }


def _memory(fit: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any] | None:
    """Return the parts of the free memory: a label, a size, the kind of a color, and the place in percent."""
    free, used = machine.get("free_bytes"), 0
    if not free or fit.get("weight_bytes") is None:
        return None
    parts: list[tuple[str, str, str, str, str]] = []
    for label, name, kind in ((_("Weights"), "weight_bytes", "fill"), (_("KV cache"), "kv_bytes", "reserved")):
        if (size := fit.get(name)) is not None:
            parts.append((label, _gib(size), kind, percent(used, free), percent(min(size, free - used), free)))
            used = min(used + size, free)
    return {"parts": parts, "spare": _gib(free - used), "free": _gib(free)}


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _fragment(ctx: PageContext, **context: Any) -> HttpResponse:
    return HttpResponse(render_to_string("operator/deployments/model.html#fit", context, ctx.request))


urlpatterns = [
    path("operator/deployments/fit", start, name="operator-deployments-fit"),
    path("operator/deployments/fit/<slug:check_id>", result, name="operator-deployments-fit-result"),
]
