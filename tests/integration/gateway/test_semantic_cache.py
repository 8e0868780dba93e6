"""The semantic layer of the answer cache, with PostgreSQL and Valkey. The tests are the worker and give the vectors."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import redis.asyncio as redis
from asgiref.sync import sync_to_async
from django.db import connection
from numpy.typing import NDArray
from psycopg.conninfo import make_conninfo

from inference_worker.contract.messages import USAGE_STREAM, End, Failed, Tokens, control_channel, decode_usage
from inference_worker.contract.request import SamplingParams, TokenCounts
from millrace.apps.answer_caches.error_bounds import missing_checks
from millrace.apps.answer_caches.semantic_decision import ALPHA_OF_BAND, BAND_STARTS
from millrace.environment.configuration import platform_settings
from millrace.gateway.admission.admission import AdmittedRequest
from millrace.gateway.answer_cache import semantic_cache, semantic_store
from millrace.gateway.answer_cache.answer_cache import AnswerCache
from millrace.gateway.answer_cache.answer_store import AnswerStore
from millrace.gateway.answer_cache.semantic_cache import SemanticCache, is_same_answer
from millrace.gateway.answer_cache.semantic_store import Answer, SemanticStore
from millrace.gateway.answer_cache.side_executions import SideExecutions
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.request_db import TenantConnectionPool
from millrace.gateway.core.types import LastTurn, Prompt
from millrace.gateway.dispatch.execution import Execution
from millrace.gateway.dispatch.jobs import InferenceJobBuilder
from millrace.gateway.dispatch.monitor import DispatchMonitor
from millrace.gateway.lifecycle.active_request import ActiveRequest
from millrace.gateway.lifecycle.service import InferenceService
from millrace.gateway.protocols.openai import completions
from millrace.gateway.stages import semantic_checks
from millrace.gateway.stages.answer_cache import AnswerCacheStage
from millrace.gateway.stages.semantic_checks import SemanticChecks
from tenants.keys.snapshot import ApiKeySnapshot, LimitSetSnapshot, LimitSnapshot
from tenants.routing_policies.policy import parse
from tests.support.gateway.inference_requests import make_request
from tests.support.gateway.replica import GATEWAY, Replica
from tests.support.gateway.service_gates import Gate, serving
from tests.support.gateway.services import find_stage, recorded, replace_stage
from tests.support.waiting import eventually_async

POLICY = parse({"rules": [{"targets": [{"model": "a"}]}], "semantic_cache": True}, version=1)
BAND = len(BAND_STARTS) - 1
CHECKS = missing_checks(0, 0, 0.2, ALPHA_OF_BAND)  # correct ones, until the band is served at 20 %
# The first two are the same question, the third is another one. Other texts have random vectors.
VECTORS = {
    "How do I reset my card?": (1.0, 0.0, 0.0),
    "How can I reset my card?": (0.99, 0.14, 0.0),
    "Where is my parcel?": (0.0, 1.0, 0.0),
    "How can I reset my 2 cards?": (0.99, 0.14, 0.0),
    "Hold the card for ten seconds.": (1.0, 0.0, 0.0),
    "It is at the post office.": (0.0, 0.0, 1.0),
    "Call us.": (0.0, 1.0, 0.0),
}


class Embedder:
    """Vectors of the tests' texts."""

    model = ServedModel("e", None, 100, 100, 0, vector_sizes=(3,))  # type: ignore[arg-type]

    def __init__(self) -> None:
        self.seconds = 0.0
        self.running = 0
        self.size = 3
        self.unbilled: list[str] = []  # executions that the tenant does not pay for

    async def embed(
        self,
        key: ApiKeySnapshot,
        name: str,
        text: str,
        *,
        is_operator_paid: bool = False,
        on_start: Callable[[Any], None] | None = None,
    ) -> NDArray[np.float32]:
        if is_operator_paid:
            self.unbilled.append(name)
        if on_start is not None:
            on_start(name)
        self.running += 1
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.running -= 1
        numbers = VECTORS.get(text) or tuple(random.Random(text).gauss(0, 1) for _ in range(3))
        vector = np.array(numbers[: self.size], np.float32)
        return vector / np.linalg.norm(vector)

    async def discard(self, name: Any) -> None:
        self.unbilled.append(name)


class Tokenized:
    """The prompt of a request that a prompt process has read."""

    async def prompt(self, model: ServedModel, number: int) -> Prompt:
        return Prompt([1, 2, 3, 4])

    async def shorten(self, model: ServedModel, number: int, max_tokens: int) -> Prompt:
        raise AssertionError


def make_key(tenant: int = 1, **fields: Any) -> ApiKeySnapshot:
    key = ApiKeySnapshot(tenant, tenant, 1, ("inference",), None, None, False, False, LimitSnapshot(), 1)
    given = {"answer_cache_seconds": 60, "semantic_cache_max_error_percent": 20, "content_retention_days": 1}
    return msgspec.structs.replace(key, **{"policies": {"m": POLICY}, **given, **fields})


class Client:
    """Requests to one gateway, and the replica that runs them."""

    def __init__(self, gate: Gate, replica: Replica, store: SemanticStore, embedder: Embedder) -> None:
        self.gate, self.replica, self.store, self.embedder = gate, replica, store, embedder

    async def ask(
        self,
        question: str,
        answer: str = "",
        key: ApiKeySnapshot | None = None,
        *directives: str,
        context: bytes = b"system prompt",
        max_tokens: int | None = 20,
        reason: Any = "stop",
    ) -> tuple[ActiveRequest, str]:
        """Send a question. Compute the answer if it is not served. Return the request and the received text."""
        self.gate.count += 1
        request = make_request(
            "m",
            [{}],
            SamplingParams(temperature=0.0),
            max_tokens,
            tokenized=Tokenized(),
            cache_directives=frozenset(directives),
            last_turn=LastTurn(question, context),
        )
        name = f"req_{self.gate.count}"
        call = await self.gate.service.begin(key or make_key(), request, completions.DIALECT, name)
        if call.execution.answer is None or not call.execution.answer.layer:
            await self.compute(call.request_id, answer, reason)
        try:
            async with asyncio.timeout(30):
                events = [event async for event in self.gate.service.events(call)]
        finally:
            self.gate.service.release(call)
        while self.gate.service._background:
            await asyncio.gather(*self.gate.service._background)
        return call, "".join(event.text for event in events if isinstance(event, Tokens))

    async def compute(self, request_id: str, answer: str, reason: Any = "stop") -> None:
        async def is_claimed() -> bool:
            return await self.replica.claim(request_id)

        await eventually_async(is_claimed)
        if reason == "failed":
            return await self.replica.send(Failed(request_id, 1, 0, "internal_error", ""))
        await self.replica.send(
            Tokens(request_id, 1, 0, [5], answer, prompt=TokenCounts(uncached=4)),
            End(request_id, 1, 1, reason, None, TokenCounts(uncached=4, output=3)),
        )

    async def learn(self, tenant: int = 1) -> None:
        """Add as many correct checks as the band needs."""
        for _ in range(CHECKS):
            await self.store.add_check(tenant, "e", BAND, 0, is_correct=True, is_hit=False)

    async def rows(self, tenant: int, query: str) -> list[dict[str, Any]]:
        async with self.store._database.tenant_transaction(tenant) as connection:
            return await (await connection.execute(query)).fetchall()  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def distinct_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no request equal another one, so that only the semantic layer can serve it."""
    numbers = iter(range(10**9))
    monkeypatch.setattr(AnswerStore, "answer_id", lambda self, parts: f"{next(numbers):064}")


@pytest_asyncio.fixture
async def client(broker: redis.Redis, transactional_db: None) -> AsyncIterator[Client]:
    name = connection.settings_dict["NAME"]
    database = TenantConnectionPool(make_conninfo(platform_settings().database_url, dbname=name))
    await database.open()
    gate = Gate(broker)
    answers, embedder = AnswerStore(broker, "secret", 60), Embedder()
    store = SemanticStore(database, answers.cipher)
    semantic = SemanticCache(store, embedder, 0.2, verified_share=0.0)  # type: ignore[arg-type]
    cache = AnswerCache(answers, gate.dispatcher, semantic)
    jobs = InferenceJobBuilder(GATEWAY, "secret", 60)
    service: InferenceService = gate.service
    replace_stage(service, AnswerCacheStage(cache, service._ends, service._background))
    side_executions = SideExecutions(gate.admission, gate.dispatcher, jobs)
    replace_stage(service, SemanticChecks(side_executions, cache, "operator"))
    monitor = DispatchMonitor(gate.dispatcher)
    await gate.dispatcher.start()
    await monitor.start()
    replica = Replica(broker, "ra", model="a")

    async def is_serving() -> bool:
        return await serving(gate, "a")

    await eventually_async(is_serving)
    yield Client(gate, replica, store, embedder)
    replica.stall()
    await service.drain()
    await monitor.stop()
    await gate.dispatcher.stop()
    await database.close()
    await sync_to_async(lambda: connection.close())()


FIRST, SIMILAR, OTHER, GUARDED = list(VECTORS)[:4]
HOLD, POST, CALL = list(VECTORS)[4:]


async def fill(client: Client, key: ApiKeySnapshot | None = None) -> str:
    """Store the answers to two questions. Return the ID of the first request."""
    first, _ = await client.ask(FIRST, HOLD, key)
    await client.ask(OTHER, POST, key)
    return first.request_id


def note(call: ActiveRequest) -> dict[str, Any]:
    return dict(recorded(call)["answer_cache"])


async def test_a_similar_question_is_served_after_enough_checks(client: Client) -> None:
    first = await fill(client)
    computed, text = await client.ask(SIMILAR, CALL, None, "no-store")
    assert text == CALL
    assert note(computed)["semantic"]["miss"] == "evidence"
    assert note(computed)["semantic"]["request_id"] == first
    await client.learn()
    hit, text = await client.ask(SIMILAR)
    assert (text, hit.execution.cache_layer) == (HOLD, "semantic")
    lookup = hit.execution.answer
    assert lookup is not None
    assert (lookup.source, round(lookup.similarity or 0, 2)) == (first, 0.99)
    assert note(hit)["layer"] == "semantic"
    # The hit is billed by the components of a cached answer: its own prompt, and the answer.
    entries = await client.gate.broker.xrange(USAGE_STREAM)
    events = [decode_usage(fields[b"e"]) for _, fields in entries]
    (event,) = [event for event in events if event.billing_context.request_id == hit.request_id]
    assert event.usage == TokenCounts(answer_hit_input=4, answer_hit_output=3)
    assert hit.execution.usage == event.usage


async def test_computed_requests_are_checks_of_the_nearest_entry(client: Client) -> None:
    await fill(client)
    await client.ask(SIMILAR, HOLD)
    query = "SELECT band, correct, wrong FROM request_log_semanticevidence"
    assert await client.rows(1, query) == [{"band": BAND, "correct": 1, "wrong": 0}]
    await client.ask(SIMILAR, CALL)  # it replaces the entry of the equal question
    assert await client.rows(1, query) == [{"band": BAND, "correct": 1, "wrong": 1}]
    # Equal answers share a group.
    counts = "SELECT count(*) AS n, count(DISTINCT answer_group) AS g FROM request_log_semanticentry"
    groups = await client.rows(1, counts)
    assert groups == [{"n": 3, "g": 3}]
    await client.ask(SIMILAR, HOLD.upper())
    groups = await client.rows(1, counts)
    assert groups == [{"n": 3, "g": 2}]


async def test_other_questions_are_computed(client: Client) -> None:
    await fill(client)
    await client.learn()
    guarded, text = await client.ask(GUARDED, CALL)
    assert (text, note(guarded)["semantic"]["guards"]) == (CALL, ["numbers"])
    for options in ({"context": b"another system prompt"}, {"max_tokens": 19}):
        call, text = await client.ask(SIMILAR, CALL, None, "no-store", **options)
        assert (text, note(call)["semantic"]["miss"]) == (CALL, "no_questions")
    call, text = await client.ask(SIMILAR, CALL, None, "no-cache")
    assert (text, note(call)["miss"]) == (CALL, "no-cache")


@pytest.mark.parametrize(
    "fields",
    [
        {"content_retention_days": 0},
        {"semantic_cache_max_error_percent": 0},
        {"policies": {"m": parse({"rules": [{"targets": [{"model": "a"}]}]})}},
    ],
)
async def test_questions_are_stored_only_with_the_consent_of_the_tenant(client: Client, fields: dict[str, Any]) -> None:
    await fill(client, make_key(**fields))
    assert await client.rows(1, "SELECT id FROM request_log_semanticentry") == []


@pytest.mark.parametrize("payer", ["operator", "tenant"])
async def test_a_wrong_hit_lowers_its_entry_at_once(
    client: Client, monkeypatch: pytest.MonkeyPatch, payer: str
) -> None:
    monkeypatch.setattr(find_stage(client.gate.service, "semantic_checks"), "_payer", payer)
    await fill(client)
    await client.learn()
    find_stage(client.gate.service, "answer_cache").answers._semantic._verified_share = 1.0
    hit, text = await client.ask(SIMILAR)
    assert text == HOLD
    await client.compute(f"{hit.request_id}.v", CALL)
    checks = find_stage(client.gate.service, "semantic_checks")
    while checks._running:
        await asyncio.gather(*checks._running)
    entries = await client.rows(1, "SELECT wrong FROM request_log_semanticentry WHERE wrong > 0")
    assert entries == [{"wrong": 1}]
    (evidence,) = await client.rows(1, "SELECT correct, wrong FROM request_log_semanticevidence")
    assert evidence == {"correct": CHECKS, "wrong": 1}
    # The tenant does not pay for the vector of the answer to the operator's check.
    assert client.embedder.unbilled == [f"{hit.request_id}.v.a"] * (payer == "operator")


async def running_check(client: Client) -> str:
    """Have a hit checked. Return the ID of the check, which a replica has claimed."""
    await fill(client)
    await client.learn()
    find_stage(client.gate.service, "answer_cache").answers._semantic._verified_share = 1.0
    hit, _ = await client.ask(SIMILAR)
    check = f"{hit.request_id}.v"

    async def is_known() -> bool:
        execution = client.gate.dispatcher.executions.get(check)
        return execution is not None and execution.owner is not None

    async def is_claimed() -> bool:
        return await client.replica.claim(check)

    await eventually_async(is_claimed)
    await eventually_async(is_known)
    return check


async def test_no_tenant_uses_all_checks(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: Any = find_stage(client.gate.service, "semantic_checks")
    monkeypatch.setattr(checks, "_run", lambda hit, question: asyncio.sleep(600))
    for tenant in (1, 2, 3, 4, 5):
        for _ in range(semantic_checks.MAX_CHECKS):
            checks.start(SimpleNamespace(tenant=tenant), None)
    assert list(checks._running.values()) == [1, 1, 1, 1, 2, 2, 3, 4]
    await checks.stop()
    assert not checks._running


@pytest.mark.parametrize("seconds", [0.0, 60.0], ids=["timeout", "stop"])
@pytest.mark.parametrize("payer", ["operator", "tenant"])
async def test_a_check_names_its_payer_however_it_ends(
    client: Client, monkeypatch: pytest.MonkeyPatch, seconds: float, payer: str
) -> None:
    checks = find_stage(client.gate.service, "semantic_checks")
    monkeypatch.setattr(checks, "_payer", payer)
    monkeypatch.setattr(semantic_checks, "CHECK_SECONDS", seconds or 2.0)
    async with client.gate.broker.pubsub() as control:
        await control.subscribe(control_channel("ra"))
        await control.get_message(timeout=60)
        check = await running_check(client)
        billing_context = client.gate.dispatcher.executions[check].job.billing_context
        assert billing_context.is_operator_paid == (payer == "operator")
        if seconds:
            await checks.stop()
        await asyncio.gather(*checks._running)
        assert await control.get_message(timeout=60) is not None  # the replica is asked to stop
    assert check not in client.gate.dispatcher.executions


async def test_a_check_is_released_if_it_cannot_be_cancelled(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    checks, gate = find_stage(client.gate.service, "semantic_checks"), client.gate
    monkeypatch.setattr(checks, "_payer", "tenant")
    check = await running_check(client)
    closed: list[str] = []

    async def cancel(execution: Execution) -> bool:
        raise redis.ConnectionError

    async def close(admitted: AdmittedRequest, usage: TokenCounts | None) -> None:
        closed.append(admitted.demand.request_id)

    monkeypatch.setattr(gate.dispatcher, "cancel", cancel)
    monkeypatch.setattr(gate.admission, "close", close)
    await checks.stop()
    assert check not in gate.dispatcher.executions
    assert closed == [check]


async def test_a_request_does_not_wait_for_a_late_vector(client: Client) -> None:
    await fill(client)
    await client.learn()
    client.embedder.seconds = 1.0
    call, text = await client.ask(SIMILAR, CALL)
    assert (text, note(call)["semantic"]) == (CALL, {"miss": "late"})
    # Its answer is stored nevertheless.
    assert len(await client.rows(1, "SELECT id FROM request_log_semanticentry")) == 3


@pytest.mark.parametrize(
    ("key", "directives", "code"),
    [
        (make_key(limits=LimitSnapshot((LimitSetSnapshot(1, "key", tokens_per_day=1),))), (), "invalid_value"),
        (make_key(), ("only-if-cached",), "not_cached"),
    ],
)
async def test_the_vector_of_a_rejected_request_is_not_computed(
    client: Client, key: ApiKeySnapshot, directives: tuple[str, ...], code: str
) -> None:
    client.embedder.seconds = 30.0
    with pytest.raises(ApiError) as rejection:
        await client.ask(FIRST, HOLD, key, *directives)
    assert rejection.value.code == code
    await asyncio.gather(*client.gate.service._background)
    assert client.embedder.running == 0


@pytest.mark.parametrize("reason", ["rejected", "failed", "internal error"])
async def test_a_vector_is_not_billed_if_its_request_is_not(client: Client, reason: str) -> None:
    await fill(client)
    assert client.embedder.unbilled == []
    service, embedder = client.gate.service, client.embedder
    if reason == "rejected":
        with pytest.raises(ApiError):  # after the lookup, which has waited for the vector
            await client.ask(SIMILAR, CALL, None, "only-if-cached")
    elif reason == "failed":
        with pytest.raises(ApiError):
            await client.ask(SIMILAR, CALL, reason="failed")
    else:
        call, _ = await client.ask(SIMILAR, CALL)
        assert embedder.unbilled == []
        await service.mark_failed(call)
    await asyncio.gather(*service._background)
    assert embedder.unbilled == [f"req_{client.gate.count}.q"]


async def test_no_tenant_uses_the_vectors_of_all(client: Client) -> None:
    client.embedder.seconds = 30.0
    semantic = find_stage(client.gate.service, "answer_cache").answers._semantic
    assert semantic is not None
    request = make_request("m", [{}], SamplingParams(temperature=0.0), 20, last_turn=LastTurn(FIRST, b""))
    begun = [semantic.begin(make_key(), request, f"req_{number}") for number in range(20)]
    assert sum(question is not None for question in begun) == semantic_cache.MAX_TENANT_PENDING
    assert semantic.begin(make_key(2), request, "req_20") is not None
    await semantic.stop()
    assert semantic.begin(make_key(), request, "req_21") is not None


async def test_vectors_of_another_size_are_misses(client: Client) -> None:
    await fill(client)
    await client.learn()
    client.embedder.size = 2
    call, text = await client.ask(SIMILAR, CALL)
    assert (text, note(call)["semantic"]) == (CALL, {"miss": "no_vector"})
    client.embedder.size = 3
    await client.rows(1, "UPDATE request_log_semanticentry SET vector = substring(vector FOR 4) RETURNING id")
    call, text = await client.ask(SIMILAR, CALL)
    assert (text, note(call)["semantic"]) == (CALL, {"miss": "no_questions"})
    assert not is_same_answer(Answer(b"1", bytes(4)), Answer(b"2", bytes(6)))


async def test_a_later_execution_of_a_request_does_not_use_an_earlier_lookup(client: Client) -> None:
    await fill(client)
    await client.learn()
    hit, _ = await client.ask(SIMILAR)
    question, request = hit.question, msgspec.structs.replace(hit.request, cache_directives=frozenset({"no-cache"}))
    assert question is not None
    assert question.is_hit
    assert question.nearest is not None
    question.is_verified = True
    assert not await find_stage(client.gate.service, "answer_cache").answers.serve(
        hit.execution, request, make_key(), question
    )
    assert (question.is_hit, question.is_verified, question.nearest) == (False, False, None)


async def test_only_a_key_with_the_scope_replaces_the_answer_to_a_question(client: Client) -> None:
    await fill(client)
    query = "SELECT request_id FROM request_log_semanticentry ORDER BY id"
    rows = await client.rows(1, query)
    await client.ask(FIRST, CALL, None, "no-cache")
    assert await client.rows(1, query) == rows
    assert client.embedder.running == 0
    call, _ = await client.ask(FIRST, CALL, make_key(scopes=("inference", "cache")), "no-cache")
    assert {"request_id": call.request_id} in await client.rows(1, query)


async def test_only_if_cached_returns_similar_answers(client: Client) -> None:
    with pytest.raises(ApiError, match="not cached"):
        await client.ask(SIMILAR, CALL, None, "only-if-cached")
    await fill(client)
    await client.learn()
    _, text = await client.ask(SIMILAR, "", None, "only-if-cached")
    assert text == HOLD


async def test_entries_are_bounded_and_encrypted(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(semantic_store, "MAX_SCOPE_ENTRIES", 3)
    monkeypatch.setattr(semantic_store, "MAX_TENANT_ENTRIES", 4)
    for number in range(5):
        await client.ask(f"Question {number}?", f"Secret {number}")
    for number in range(3):
        await client.ask(f"Question {number}?", f"Secret {number}", context=b"another")
    rows = await client.rows(1, "SELECT scope, question, answer FROM request_log_semanticentry")
    assert len(rows) == 4
    assert sorted(len([row for row in rows if row["scope"] == scope]) for scope in {row["scope"] for row in rows}) == [
        1,
        3,
    ]
    for row in rows:
        assert b"Secret" not in bytes(row["answer"])
        assert b"Question" not in bytes(row["question"])
    # Another secret cannot read them.
    other = SemanticStore(client.store._database, AnswerStore(client.gate.broker, "another secret", 60).cipher)
    ids = await client.rows(1, "SELECT id, scope FROM request_log_semanticentry")
    for row in ids:
        assert await client.store.read_entry(1, row["scope"], row["id"]) is not None
        assert await other.read_entry(1, row["scope"], row["id"]) is None
        assert await client.store.read_entry(2, row["scope"], row["id"]) is None


async def test_an_answer_that_may_not_be_kept_is_neither_stored_nor_a_check(client: Client) -> None:
    await fill(client)
    unkept: list[tuple[str, Any, int | None]] = [
        (HOLD, "content_filter", 20),
        (" ", "stop", 20),
        ("", "length", 20),
        (HOLD, "length", None),  # the limit is not the request's
    ]
    for answer, reason, max_tokens in unkept:
        call, _ = await client.ask(SIMILAR, answer, None, max_tokens=max_tokens, reason=reason)
        assert note(call)["miss"] == "not_cached"
    assert len(await client.rows(1, "SELECT id FROM request_log_semanticentry")) == 2
    assert await client.rows(1, "SELECT band FROM request_log_semanticevidence") == []
    await client.ask(SIMILAR, HOLD, None, reason="length")
    assert len(await client.rows(1, "SELECT id FROM request_log_semanticentry")) == 3


async def test_no_tenant_receives_the_text_of_another(client: Client) -> None:
    """Two tenants send random questions in the same conversation. Each answer names its tenant."""
    chance = random.Random(7)
    questions = [FIRST, SIMILAR, OTHER, "Who are you?", "Who may you be?"]
    for tenant in (1, 2):
        await client.learn(tenant)
    hits = 0
    for number in range(60):
        tenant, question = chance.choice((1, 2)), chance.choice(questions)
        call, text = await client.ask(question, f"tenant {tenant}: {number}", make_key(tenant))
        assert text.startswith(f"tenant {tenant}: ")
        hits += call.execution.cache_layer == "semantic"
    assert hits
    for tenant in (1, 2):
        owners = await client.rows(tenant, "SELECT DISTINCT tenant_id FROM request_log_semanticentry")
        assert owners == [{"tenant_id": tenant}]
