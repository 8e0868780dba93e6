"""Requests in the gateway's internal form."""

from __future__ import annotations

from typing import Any

from inference_worker.contract.request import SamplingParams
from millrace.gateway.core.types import InferenceRequest, RequestAnalysis, RequestSource
from millrace.gateway.protocols.dialect_readers import READERS


def make_request(
    model: str = "m",
    prompt: list[Any] | str = "Hello",
    sampling: SamplingParams | None = None,
    max_tokens: int | None = None,
    **fields: Any,
) -> InferenceRequest:
    """Return a request. `fields` are further fields of it and of its analysis."""
    analysis = {name: fields.pop(name) for name in RequestAnalysis.__struct_fields__ if name in fields}
    params = SamplingParams() if sampling is None else sampling
    return InferenceRequest(model, prompt, params, max_tokens, RequestAnalysis(**analysis), **fields)


def read_for_upstream(reader: str, body: bytes) -> InferenceRequest:
    """Read a body as for a model that an upstream may run."""
    return READERS[reader](body).change_analysis(source=RequestSource(reader, body))
