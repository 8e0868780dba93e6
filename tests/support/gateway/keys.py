"""API keys and limits as the gateway reads them."""

from __future__ import annotations

from typing import Any

from millrace.gateway.admission.admission import AdmissionRequest
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.routing.router import Candidate
from tenants.keys.snapshot import ApiKeySnapshot, LimitSetSnapshot, LimitSnapshot

KEY = ApiKeySnapshot(1, 1, 1, ("inference",), None, None, False, False, LimitSnapshot(), 1)


MODEL = ServedModel("m", None, 4096, 1000, 0)  # type: ignore[arg-type]  # no tokenizer


def make_key(*sets: LimitSetSnapshot) -> ApiKeySnapshot:
    return ApiKeySnapshot(1, 7, 1, ("inference",), None, None, False, False, LimitSnapshot(sets), 1)


def make_demand(
    key: ApiKeySnapshot, request_id: str = "req_1", prompt: int = 10, max_tokens: int | None = 20, name: str = "m"
) -> AdmissionRequest:
    return AdmissionRequest(request_id, 0, key, name, [Candidate(MODEL)], prompt, max_tokens)


def key_set(**limits: Any) -> LimitSetSnapshot:
    return LimitSetSnapshot(1, "key", **limits)
