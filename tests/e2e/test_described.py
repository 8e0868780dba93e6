"""Conformance of the running platform to docs/openapi.yaml, tested by schemathesis: no internal errors, no hangs, and
only documented responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance

from tests.support.stack import EMBEDDING_MODEL, MODEL, RERANK_MODEL, Stack
from tools.openapi.formatting import read_yaml

DOCUMENT = read_yaml((Path(__file__).parents[2] / "docs" / "openapi.yaml").read_text(encoding="utf-8"))
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations()]
# Operation -> fields that keep a valid request's output short.
SHORT: dict[str, dict[str, Any]] = {
    "createChatCompletion": {"model": MODEL, "max_tokens": 2, "max_completion_tokens": 2, "n": 1, "min_tokens": 0},
    "createCompletion": {"model": MODEL, "max_tokens": 2, "n": 1, "min_tokens": 0},
    "createEmbedding": {"model": EMBEDDING_MODEL},
    "createRerank": {"model": RERANK_MODEL},
    "createScore": {"model": RERANK_MODEL},
    "createResponse": {"model": MODEL, "max_output_tokens": 2},
    "createMessage": {"model": MODEL, "max_tokens": 2},
    "countTokens": {"model": MODEL},
}
SECONDS = 30


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: f"{each.method} {each.path}")
def test_responses_conform_to_the_openapi_document(priced: Stack, operation: Any) -> None:
    @given(case=operation.as_strategy())
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def check_response(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body = {**case.body, **SHORT.get(operation.definition.raw["operationId"], {})}
        response = case.call(base_url=priced.url, headers=priced.headers, timeout=SECONDS)
        case.validate_response(response, checks=[not_a_server_error])
        if response.headers.get("content-type", [""])[0].startswith("application/json"):
            case.validate_response(response, checks=[response_schema_conformance])

    check_response()
