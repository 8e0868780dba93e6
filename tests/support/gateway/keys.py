"""API keys and limits as the gateway reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inference_worker.contract.request import CacheBreakpoint, SamplingParams
from millrace.gateway.admission.admission import AdmissionRequest
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.types import Prompt
from tenants.keys.snapshot import ApiKeySnapshot, LimitSetSnapshot, LimitSnapshot
from tests.support.gateway.inference_requests import make_request

KEY = ApiKeySnapshot(1, 1, 1, ("inference",), None, None, False, False, LimitSnapshot(), 1)


MODEL = ServedModel("m", None, 4096, 1000, 0)  # type: ignore[arg-type]  # no tokenizer


def make_key(*sets: LimitSetSnapshot) -> ApiKeySnapshot:
    return ApiKeySnapshot(1, 7, 1, ("inference",), None, None, False, False, LimitSnapshot(sets), 1)


def make_demand(
    key: ApiKeySnapshot,
    request_id: str = "req_1",
    prompt: int = 10,
    max_tokens: int | None = 20,
    name: str = "m",
    *,
    models: Sequence[ServedModel] = (MODEL,),
    admitted_at: int = 0,
    n: int = 1,
    breakpoints: tuple[CacheBreakpoint, ...] = (),
    **request: Any,
) -> AdmissionRequest:
    """Return a request with a prompt of this length. `request` are further arguments of `make_request`."""
    fields: dict[str, Any] = {"prompt": [{}], "sampling": SamplingParams(n=n), "max_tokens": max_tokens, **request}
    prompt_tokens = Prompt([1] * prompt, breakpoints)
    return AdmissionRequest(request_id, admitted_at, key, make_request(name, **fields), prompt_tokens, [*models])


def key_set(**limits: Any) -> LimitSetSnapshot:
    return LimitSetSnapshot(1, "key", **limits)
