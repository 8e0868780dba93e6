"""The identity of answers: what two requests must have in common to share an answer, in both caches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from inference_worker.contract.messages import BillingContext, InferenceJob
from inference_worker.contract.request import (
    SAMPLING_PARAMETERS,
    CacheBreakpoint,
    ReasoningSpec,
    SamplingParams,
    ServiceClass,
    StructuredSpec,
)
from inference_worker.contract.upstreams import UpstreamRequest
from millrace.gateway.answer_cache.answer_identity import exact_parts, similar_parts
from millrace.gateway.answer_cache.answer_store import encode_answer
from millrace.gateway.core.decision_record import DecisionRecord
from tenants.keys.snapshot import ApiKeySnapshot, LimitSnapshot
from tests.support.engine.sampling_values import other_value

JOB = InferenceJob(
    BillingContext(1, "req_1", 0, 1, 1, 1, "a"),
    "gw",
    [1, 2, 3],
    SamplingParams(temperature=0.5, seed=7),
    b"salt",
    1.0,
    structured=StructuredSpec("regex", "a+"),
    reasoning=ReasoningSpec("deepseek"),
    upstream=UpstreamRequest("chat", b"{}", 3, 3),
    credential=5,
)
KEY = ApiKeySnapshot(1, 1, 1, ("inference",), None, None, False, False, LimitSnapshot(), 1)
OWN = msgspec.structs.replace(KEY, credentials={"a": 5}, credential_versions={"a": 1, "b": 1})
# Another value of each field, and the fields that an answer does not depend on.
JOB_FIELDS: dict[str, Any] = {
    "billing_context": msgspec.structs.replace(JOB.billing_context, model="b"),
    "prompt_token_ids": [1, 2, 4],
    "params": SamplingParams(temperature=0.7, seed=7),
    "cache_salt": b"another",
    "structured": None,
    "reasoning": None,
    "version": "2",
    "upstream": None,
    "credential": 6,
}
FREE_JOB_FIELDS: dict[str, Any] = {
    "gateway_id": "gw-b",
    "deadline": 2.0,
    "weight": 2.0,
    "service_class": ServiceClass.BATCH,
    "priority": 1,
    "breakpoints": (CacheBreakpoint(1, 300),),
    "input_lengths": (1,),  # of encoders and cross-encoders, whose results are not cached
    "second_starts": (1,),
    "searches": 1,
    "replicas_with_prefix": ("ra",),
    "is_tenant_credential": True,  # the credential's ID decides
    "speculates": False,  # drafts do not change an answer
    "prediction": (1,),
    "hides_output": True,  # its results are not cached
}
UPSTREAM: dict[str, Any] = {"operation": "messages", "body": b'{"a":1}'}
FREE_UPSTREAM: dict[str, Any] = {"prompt_tokens": 4, "estimated_tokens": 4, "waits_for_capacity": False}


def made(job: InferenceJob = JOB, key: ApiKeySnapshot = KEY, policy: int = 1, whole: list[int] | None = None) -> Any:
    request = SimpleNamespace(max_tokens=job.params.max_tokens)
    admitted = SimpleNamespace(demand=SimpleNamespace(key=key, request=request))
    record = DecisionRecord(policy={"version": policy})
    return SimpleNamespace(job=job, admitted=admitted, decision_record=record, whole_prompt=whole)


def exact(*args: Any, **fields: Any) -> bytes:
    return encode_answer(exact_parts(made(*args, **fields)))


def similar(*args: Any, context: bytes = b"c", embedding: str = "e", **fields: Any) -> bytes:
    return encode_answer(similar_parts(made(*args, **fields), context, embedding))


def changed(**fields: Any) -> InferenceJob:
    return msgspec.structs.replace(JOB, **fields)


def test_every_field_is_in_a_table() -> None:
    """A new field must be added to the identity, or to the fields that an answer does not depend on."""
    assert set(JOB.__struct_fields__) == JOB_FIELDS.keys() | FREE_JOB_FIELDS.keys()
    assert set(UpstreamRequest.__struct_fields__) == UPSTREAM.keys() | FREE_UPSTREAM.keys()


@pytest.mark.parametrize("name", JOB_FIELDS)
def test_a_field_that_an_answer_depends_on_is_part_of_the_exact_identity(name: str) -> None:
    assert exact(changed(**{name: JOB_FIELDS[name]})) != exact()


@pytest.mark.parametrize("name", FREE_JOB_FIELDS)
def test_other_fields_are_not(name: str) -> None:
    job = changed(**{name: FREE_JOB_FIELDS[name]})
    assert getattr(job, name) != getattr(JOB, name)
    assert (exact(job), similar(job)) == (exact(), similar())


@pytest.mark.parametrize("name", SAMPLING_PARAMETERS)
def test_all_parameters_are_part_of_both_identities(name: str) -> None:
    job = changed(params=msgspec.structs.replace(JOB.params, **{name: other_value(name)}))
    assert exact(job) != exact()
    assert similar(job) != similar()


@pytest.mark.parametrize("name", [*UPSTREAM, *FREE_UPSTREAM])
def test_the_request_to_an_upstream_is_part_of_the_exact_identity(name: str) -> None:
    upstream = msgspec.structs.replace(JOB.upstream, **{name: (UPSTREAM | FREE_UPSTREAM)[name]})  # type: ignore[type-var]
    assert (exact(changed(upstream=upstream)) != exact()) is (name in UPSTREAM)


@pytest.mark.parametrize("identity", [exact, similar])
def test_the_partition_is_part_of_both_identities(identity: Any) -> None:
    own = changed(is_tenant_credential=True)
    rotated = msgspec.structs.replace(OWN, credential_versions={"a": 2, "b": 1})
    of_project = [msgspec.structs.replace(KEY, answer_cache_scope="project", project_id=each) for each in (1, 2)]
    partitions = [
        *(identity(changed(**{name: JOB_FIELDS[name]})) for name in ("billing_context", "cache_salt", "version")),
        identity(),
        identity(policy=2),
        identity(changed(credential=None)),
        identity(changed(credential=6)),
        identity(own, OWN),
        identity(own, rotated),
        *(identity(key=key) for key in of_project),
    ]
    assert len(set(partitions)) == len(partitions) == 11


@pytest.mark.parametrize("identity", [exact, similar])
def test_what_no_answer_depends_on_is_part_of_neither_identity(identity: Any) -> None:
    """Keys and projects share answers by default. Versions of credentials count only if the request uses them."""
    other = msgspec.structs.replace(KEY, key_id=2, project_id=2, credential_versions={"a": 3})
    assert identity(key=other) == identity()
    own = changed(is_tenant_credential=True)
    other_version = msgspec.structs.replace(OWN, credential_versions={"a": 1, "b": 2})
    assert identity(own, other_version) == identity(own, OWN)
    renamed = changed(structured=StructuredSpec("regex", "a+", param="text.format"))
    assert identity(renamed) == identity()
    greedy = [changed(params=SamplingParams(temperature=0.0, seed=seed)) for seed in (None, 1)]
    assert identity(greedy[0]) == identity(greedy[1])


def test_the_turns_before_the_last_and_the_embedding_are_part_of_the_identity_of_similar_questions() -> None:
    assert len({similar(), similar(context=b"d"), similar(embedding="f")}) == 3
    assert similar(changed(prompt_token_ids=[9])) == similar()
    assert exact(whole=[1, 2, 3]) != exact()
