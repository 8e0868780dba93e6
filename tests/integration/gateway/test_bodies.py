"""Request bodies: checks before a body is received, its size limits, and where it is decoded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import redis.asyncio as redis

from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.settings import ModelSpec
from millrace.gateway.admission.admission import RateLimitAdmission
from millrace.gateway.auth.active_requests import ActiveRequests
from millrace.gateway.core import request_body
from millrace.gateway.core.body_memory import MAX_BYTES, MAX_TENANT_BYTES, BodyMemory
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.cors import CrossOrigin
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.request_body import RequestBody
from millrace.gateway.core.types import InferenceRequest
from millrace.gateway.http.consumer import HttpConsumer
from millrace.gateway.http.endpoints.feedback import SubmitFeedback
from millrace.gateway.http.endpoints.inference import ChatCompletions, Unknown
from millrace.gateway.http.endpoints.messages import CountTokens
from millrace.gateway.prompt_processes import prompt_pool, prompt_reader
from millrace.gateway.prompt_processes.prompt_pool import PromptPool
from millrace.gateway.prompt_processes.prompt_reader import PromptReader
from millrace.gateway.protocols import prompt_bounds
from millrace.gateway.protocols.dialect_readers import COUNT, READERS, SOCKET
from millrace.gateway.protocols.openai import chat, completions
from millrace.gateway.protocols.prompt_bounds import SMALL_BODY_BYTES, check_bounds, max_body_bytes, max_characters
from millrace.gateway.protocols.prompts import tokenize
from millrace.gateway.routing.router import Router
from tenants.keys.snapshot import ApiKeySnapshot, LimitSetSnapshot, LimitSnapshot
from tenants.limits.token_buckets import DAY, bucket, buckets_key
from tenants.routing_policies.policy import parse
from tests.support.gateway.bundles import load_models
from tests.support.gateway.keys import make_demand
from tests.support.waiting import eventually_async

BODY_BYTES = 7_400_000
PIECE = b" " * 65_536
EMPTY_PARTS = [{"type": "text", "text": ""}] * 9000
TOKEN = b"Bearer sk-mr-test"


def key_of(tenant: int = 7, *sets: LimitSetSnapshot, **fields: Any) -> ApiKeySnapshot:
    scopes = fields.pop("scopes", ("inference",))
    return ApiKeySnapshot(1, tenant, 1, scopes, None, None, False, False, LimitSnapshot(sets), 1, **fields)


class Keys:
    """A fake key store."""

    def __init__(self, key: ApiKeySnapshot) -> None:
        self._key = key

    async def authenticate(self, headers: dict[bytes, bytes], scope: str, address: str) -> ApiKeySnapshot:
        if headers.get(b"authorization") != TOKEN:
            raise ApiError("invalid_api_key", "Incorrect API key provided.")
        if scope not in self._key.scopes:
            raise ApiError("insufficient_scope", "This API key may not be used here.")
        return self._key


class Connection:
    """A client that sends a body as fast as it is received, with a count of the bytes before the response."""

    def __init__(self, size: int, **headers: str) -> None:
        self.left = size
        self.headers = {"content-length": str(size), "authorization": TOKEN.decode()} | headers
        self.received = 0
        self.received_before_answer: int | None = None
        self.status = 0
        self.answer_headers: dict[bytes, bytes] = {}
        self.body = b""
        self._over = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if self._over.is_set():
            return {"type": "http.disconnect"}
        if not self.left and self.received:
            await self._over.wait()
            return {"type": "http.disconnect"}
        piece = PIECE[: self.left]
        self.left -= len(piece)
        self.received += len(piece)
        return {"type": "http.request", "body": piece, "more_body": bool(self.left)}

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status, self.received_before_answer = message["status"], self.received
            self.answer_headers = dict(message["headers"])
            return
        self.body += message.get("body", b"")
        if not message.get("more_body"):
            self._over.set()

    @property
    def code(self) -> str:
        error = msgspec.json.decode(self.body)["error"]
        return str(error.get("code", error["type"]))


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A gateway with only the parts that read request bodies."""

    async def current_limit_statuses(key: ApiKeySnapshot) -> list[Any]:
        return []

    counted = SimpleNamespace(labels=lambda *_: SimpleNamespace(inc=lambda: None))
    found = SimpleNamespace(
        keys=Keys(key_of()),
        active_requests=ActiveRequests(),
        settings=SimpleNamespace(max_request_body_bytes=2 * 2**20, base_url="http://llm.test"),
        metrics=SimpleNamespace(requests=counted),
        admission=SimpleNamespace(current_limit_statuses=current_limit_statuses),
        request_log=SimpleNamespace(end=lambda *_, **__: None),
        body_memory=BodyMemory(),
        cross_origin=CrossOrigin((), None),  # type: ignore[arg-type]  # no database: no request is a preflight
    )
    monkeypatch.setattr("millrace.gateway.http.consumer.running_gateway", lambda: found)
    monkeypatch.setattr("millrace.gateway.core.request_body.DISCARD_PAUSE_SECONDS", 0, raising=False)
    return found


async def call(consumer: type[HttpConsumer], connection: Connection, method: str = "POST") -> Connection:
    headers = [(name.encode(), value.encode()) for name, value in connection.headers.items() if value]
    scope = {"type": "http", "method": method, "path": "/v1/x", "client": ("127.0.0.1", 1), "headers": headers}
    scope["url_route"] = {"kwargs": {"request_id": "req_1"}}
    async with asyncio.timeout(60):
        await consumer.as_asgi()(scope, connection.receive, connection.send)
    return connection


# Authentication before the body.


@pytest.mark.parametrize(
    ("consumer", "method", "headers", "status"),
    [
        (ChatCompletions, "POST", {"authorization": "Bearer sk-mr-wrong"}, 401),
        (ChatCompletions, "POST", {"authorization": ""}, 401),
        (ChatCompletions, "PUT", {}, 405),
        (CountTokens, "POST", {"authorization": "Bearer sk-mr-wrong"}, 401),
        (SubmitFeedback, "POST", {"authorization": "Bearer sk-mr-wrong"}, 401),
        (Unknown, "POST", {}, 404),
    ],
)
async def test_a_request_rejected_by_its_headers_gets_a_response_before_its_body_is_received(
    gateway: SimpleNamespace, consumer: type[HttpConsumer], method: str, headers: dict[str, str], status: int
) -> None:
    connection = await call(consumer, Connection(BODY_BYTES, **headers), method)
    assert (connection.status, connection.received_before_answer) == (status, 0)
    assert connection.received == BODY_BYTES  # then discarded, so that a client that sends first can read the response
    assert b"connection" not in connection.answer_headers


async def test_a_key_without_the_scope_is_rejected_before_the_body(gateway: SimpleNamespace) -> None:
    gateway.keys = Keys(key_of(scopes=("models",)))
    connection = await call(ChatCompletions, Connection(BODY_BYTES))
    assert (connection.status, connection.received_before_answer) == (403, 0)


@pytest.mark.parametrize("headers", [{}, {"content-length": "", "transfer-encoding": "chunked"}])
async def test_a_rejected_body_is_discarded_up_to_a_limit(
    gateway: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]
) -> None:
    monkeypatch.setattr(request_body, "DISCARD_BYTES", 1_000_000)
    connection = await call(ChatCompletions, Connection(BODY_BYTES, authorization="Bearer sk-mr-wrong", **headers))
    assert connection.status == 401
    assert 1_000_000 <= connection.received <= 1_000_000 + len(PIECE)
    assert connection.answer_headers[b"connection"] == b"close"


async def test_the_wait_for_a_rejected_body_has_a_timeout(
    gateway: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_body, "DISCARD_SECONDS", 0.05)
    connection = Connection(BODY_BYTES, authorization="Bearer sk-mr-wrong", expect="100-continue")
    monkeypatch.setattr(connection, "receive", connection._over.wait)
    connection._over.clear()
    waiting = asyncio.create_task(call(ChatCompletions, connection))
    await eventually_async(connection._over.is_set)
    waiting.cancel()
    assert connection.status == 401


# Size limits.


async def test_a_body_with_a_too_large_content_length_is_not_received(gateway: SimpleNamespace) -> None:
    connection = await call(SubmitFeedback, Connection(BODY_BYTES))
    assert (connection.status, connection.code, connection.received_before_answer) == (413, "request_too_large", 0)


async def test_a_chunked_body_is_received_up_to_its_limit(gateway: SimpleNamespace) -> None:
    connection = Connection(BODY_BYTES, **{"content-length": "", "transfer-encoding": "chunked"})
    await call(SubmitFeedback, connection)
    assert connection.status == 413
    assert connection.received_before_answer == len(PIECE)


def test_the_size_limit_depends_on_the_keys_models(model: ServedModel) -> None:
    longest = max_characters(model)
    assert longest == model.context_length * model.tokenizer.longest_token_bytes
    allowance = prompt_bounds.ALLOWANCE_BYTES
    assert max_body_bytes([model], 1, 2**30) == allowance + 6 * longest
    assert max_body_bytes([model], 64, 2**30) == allowance + 64 * 6 * longest
    assert max_body_bytes([model], 1, 1000) == 1000
    assert max_body_bytes([], 1, 2**30) == allowance


async def test_the_memory_of_large_bodies_is_shared_between_tenants() -> None:
    memory = BodyMemory()
    first = memory.lease(1)
    first.grow(MAX_TENANT_BYTES)
    with pytest.raises(ApiError) as exc_info:
        memory.lease(1).grow(1)
    assert (exc_info.value.status, exc_info.value.retry_after) == (429, 1)
    others = [memory.lease(tenant) for tenant in range(2, 2 + MAX_BYTES // MAX_TENANT_BYTES)]
    for lease in others:
        lease.grow(MAX_TENANT_BYTES)
    with pytest.raises(ApiError) as exc_info:
        memory.lease(99).grow(MAX_TENANT_BYTES)
    assert exc_info.value.status == 503
    for lease in (first, *others):
        lease.release()
        lease.release()
    assert memory.used == 0
    memory.lease(1).grow(1)


async def test_a_disconnected_client_ends_the_reading() -> None:
    messages = iter([{"type": "http.request", "body": b"a", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> dict[str, Any]:
        return next(messages)

    body = RequestBody("POST", {b"content-length": b"2"}, receive)
    with pytest.raises(request_body.ClientGone):
        _ = [piece async for piece in body.pieces(10)]
    assert body.gone


# Decoding on the event loop and in prompt processes.


@pytest.fixture(scope="module")
def models() -> dict[str, ServedModel]:
    specs = [ModelSpec("m", "embedded", "auto"), ModelSpec("e", "embedded:minilm", "auto")]
    return load_models(specs)


@pytest.fixture
def model(models: dict[str, ServedModel]) -> ServedModel:
    return models["m"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(models: dict[str, ServedModel]) -> AsyncIterator[PromptPool]:
    """One process for all tests. On a busy machine it has a small share of the CPU, since its priority is low."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_pool, "WAIT_SECONDS", 60)
        patch.setattr(prompt_pool, "WORK_SECONDS", 60)
        found = PromptPool(models, 1)
        await found.start()
        await eventually_async(lambda: models["m"].tokenizer.is_template_cheap)  # measured in the process
        yield found
        await found.stop()
    assert not found.pids


with_pool = pytest.mark.asyncio(loop_scope="module")  # the event loop of `pool`


class Charges:
    """A fake admission that records charges and rejects requests if `refuse` is set."""

    def __init__(self) -> None:
        self.charged: list[int] = []
        self.refuse: ApiError | None = None

    async def charge(self, key: ApiKeySnapshot) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.charged.append(key.tenant_id)


@pytest.fixture
def charges() -> Charges:
    return Charges()


@pytest.fixture
def reader(models: dict[str, ServedModel], pool: PromptPool, charges: Charges) -> PromptReader:
    return PromptReader(Router(models), charges, pool, 2 * 2**20, "reject")  # type: ignore[arg-type]


@pytest.fixture
def work_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[int]]]:
    """Record what this process decodes (bytes) and tokenizes (characters)."""
    done: dict[str, list[int]] = {"decoded": [], "tokenized": []}

    def counted(read: Any) -> Any:
        def read_and_count(body: bytes) -> InferenceRequest:
            done["decoded"].append(len(body))
            return read(body)

        return read_and_count

    def encode(self: Tokenizer, text: str, **options: Any) -> list[int]:
        done["tokenized"].append(len(text))
        return encode_really(self, text, **options)

    encode_really = Tokenizer.encode
    monkeypatch.setattr(prompt_reader, "READERS", {name: counted(read) for name, read in READERS.items()})
    monkeypatch.setattr(Tokenizer, "encode", encode)
    return done


def messages_of(*contents: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content} for content in contents]


def chat_body(messages: Any, **fields: Any) -> bytes:
    return msgspec.json.encode({"model": "m", "messages": messages, "max_tokens": 8, **fields})


async def rejection(reader: PromptReader, body: bytes, dialect: str = chat.DIALECT) -> ApiError:
    with pytest.raises(ApiError) as exc_info:
        await reader.read(key_of(), dialect, body)
    return exc_info.value


@with_pool
async def test_a_small_body_is_decoded_on_the_event_loop(
    reader: PromptReader, model: ServedModel, work_here: dict[str, list[int]], charges: Charges
) -> None:
    body = chat_body(messages_of("Hello"))
    request = await reader.read(key_of(), chat.DIALECT, body)
    assert (await tokenize(model, request)).ids
    assert (request.analysis.tokenized, work_here["decoded"], charges.charged) == (None, [len(body)], [])


@with_pool
async def test_a_large_body_is_decoded_and_tokenized_by_a_prompt_process(
    reader: PromptReader, model: ServedModel, work_here: dict[str, list[int]]
) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    mark = {"type": "text", "text": "A long text. " * 900, "prompt_cache_breakpoint": {}}
    messages = [{"role": "system", "content": [mark]}, *messages_of("What is it about?")]
    body = chat_body(messages, tools=tools, stop=["x"], temperature=0.5, metadata={"a": "b"}, stream=True)
    assert len(body) > SMALL_BODY_BYTES
    request = await reader.read(key_of(), chat.DIALECT, body)
    prompt = await tokenize(model, request)
    assert work_here == {"decoded": [], "tokenized": []}
    here = chat.read_chat(body)  # equal except for the prompt's text
    expected = await tokenize(model, here)
    assert prompt == expected
    assert len(prompt.breakpoints) == 1
    for name in ("model", "sampling", "max_tokens", "tools", "tool_choice", "breakpoints", "metadata", "stream"):
        assert getattr(request, name) == getattr(here, name), name
    assert request.prompt_param == "messages"
    assert request.analysis.is_charged


@with_pool
async def test_a_small_body_of_many_empty_messages_is_rendered_by_a_prompt_process(
    reader: PromptReader, work_here: dict[str, list[int]], charges: Charges
) -> None:
    body = chat_body(messages_of(*[""] * 120))
    assert len(body) <= SMALL_BODY_BYTES
    request = await reader.read(key_of(), chat.DIALECT, body)
    assert request.analysis.tokenized is not None
    assert work_here["tokenized"] == []
    assert charges.charged == [7]


@with_pool
@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (chat_body(messages_of(*[""] * 65_000)), "context_length_exceeded", "65000 messages"),
        (
            chat_body([{"role": "user", "content": [{"type": "text", "text": ""}] * 9000}]),
            "context_length_exceeded",
            "9000",
        ),
        (chat_body(messages_of("x" * 1_900_000)), "context_length_exceeded", "1900000 characters"),
        (
            chat_body(messages_of("The quick brown fox. " * 30_000)),
            "context_length_exceeded",
            "the first 131072 characters",
        ),
        (chat_body(messages_of("Hello " * 9000)), "context_length_exceeded", "9031 tokens"),
        (b'{"model": "m", "messages": %s' % (b"[" * 50_000), "invalid_json", "not valid JSON"),
        (chat_body(messages_of("x" * 5000), model="none"), "model_not_found", "none"),
        (chat_body(messages_of("x" * 5000), model="e"), "invalid_value", "embedding model"),
        (chat_body(messages_of("x" * 5000), nonsense=1), "unknown_parameter", "nonsense"),
    ],
)
async def test_a_prompt_process_reports_the_error_of_a_large_body(
    reader: PromptReader, work_here: dict[str, list[int]], body: bytes, code: str, words: str
) -> None:
    api_error = await rejection(reader, body)
    assert (api_error.code, work_here) == (code, {"decoded": [], "tokenized": []})
    assert words in api_error.message


@with_pool
async def test_tokens_are_counted_beyond_the_context(reader: PromptReader, model: ServedModel) -> None:
    body = msgspec.json.encode({"model": "m", "messages": messages_of("Hello " * 9000)})
    request = await reader.read(key_of(), COUNT, body)
    assert len((await tokenize(model, request)).ids) > model.context_length


@with_pool
async def test_several_prompts_are_read_together(
    reader: PromptReader, model: ServedModel, work_here: dict[str, list[int]]
) -> None:
    texts = ["One " * 2000, "Two " * 1000]
    request = await reader.read(
        key_of(), completions.DIALECT, msgspec.json.encode({"model": "m", "prompt": texts, "echo": True})
    )
    assert len(request.more_prompts) == 1
    assert work_here["tokenized"] == []
    tokenized = request.analysis.tokenized
    assert tokenized is not None
    found = [(await tokenized.prompt(model, number)).ids for number in (0, 1)]
    assert found == [model.tokenizer.encode(text) for text in texts]


@with_pool
async def test_embeddings_and_websocket_messages_use_prompt_processes_too(
    reader: PromptReader, models: dict[str, ServedModel], work_here: dict[str, list[int]]
) -> None:
    body = msgspec.json.encode({"model": "e", "input": ["Some words to embed. " * 20] * 20})
    prompt = await tokenize(models["e"], await reader.read(key_of(), "openai.embedding", body))
    assert len(prompt.input_lengths) == 20
    message = msgspec.json.encode(
        {"id": "a", "type": "request", "model": "m", "messages": messages_of("Hello " * 1000)}
    )
    request = await reader.read(key_of(), SOCKET, message)
    assert (request.stream, len((await tokenize(models["m"], request)).ids) > 1000) == (True, True)
    assert work_here == {"decoded": [], "tokenized": []}


@with_pool
async def test_the_body_is_read_again_for_another_deployments_tokenizer(
    pool: PromptPool, models: dict[str, ServedModel], charges: Charges
) -> None:
    other = ServedModel("e", models["m"].tokenizer, 8192, 49152, 0, (), directory=models["m"].directory)
    both = {"m": models["m"], "e": models["e"]}
    policy = parse({"rules": [{"targets": [{"model": "m"}, {"model": "e"}]}]}, version=1)
    reader = PromptReader(Router(both), charges, pool, 2**21)  # type: ignore[arg-type]
    request = await reader.read(
        key_of(policies={"p": policy}), chat.DIALECT, chat_body(messages_of("x " * 3000), model="p")
    )
    assert len((await tokenize(models["m"], request)).ids) > 3000
    assert len((await tokenize(other, request)).ids) > 3000  # the same tokenizer, so the body is not read again
    with pytest.raises(ApiError, match="embedding model"):
        await tokenize(models["e"], request)


def test_the_number_of_tools_is_limited(model: ServedModel) -> None:
    parameters = {"type": "object", "description": "x" * 300_000}
    tool = {"type": "function", "function": {"name": "a", "parameters": parameters}}
    request = chat.read_chat(chat_body(messages_of("Hello"), tools=[tool]))
    with pytest.raises(ApiError, match="Tools may have"):
        check_bounds(request, model.context_length, max_characters(model))


# Charges to rate limits.


@with_pool
async def test_a_request_over_its_tenants_rate_limit_is_not_read(
    reader: PromptReader, pool: PromptPool, charges: Charges, monkeypatch: pytest.MonkeyPatch
) -> None:
    charges.refuse = ApiError("rate_limit_exceeded", "Rate limit reached.", retry_after=20)
    monkeypatch.setattr(pool, "run", None)  # it would raise
    assert (await rejection(reader, chat_body(messages_of(*[""] * 120)))).code == "rate_limit_exceeded"


@with_pool
async def test_a_large_body_is_charged_before_it_is_received(gateway: SimpleNamespace, reader: PromptReader) -> None:
    gateway.prompts = reader
    reader._admission.refuse = ApiError("rate_limit_exceeded", "Rate limit reached.", retry_after=20)  # type: ignore[attr-defined]
    connection = await call(ChatCompletions, Connection(1_000_000))
    assert (connection.status, connection.received_before_answer) == (429, 0)


@with_pool
async def test_a_body_above_the_size_limit_is_charged_and_not_received(
    gateway: SimpleNamespace, reader: PromptReader, charges: Charges
) -> None:
    gateway.prompts = reader
    connection = await call(ChatCompletions, Connection(BODY_BYTES))
    assert (connection.status, connection.received_before_answer, charges.charged) == (413, 0, [7])
    assert gateway.body_memory.used == 0


async def test_a_charged_request_is_counted_once(broker: redis.Redis, model: ServedModel) -> None:
    key = key_of(
        7, LimitSetSnapshot(1, "key", requests_per_day=3), LimitSetSnapshot(2, "key", model="m", requests_per_day=3)
    )
    gate = RateLimitAdmission(broker)

    async def level(number: int) -> int:
        level, _ = bucket(await broker.get(buckets_key(7, number)), "requests_per_day")
        return round(level / DAY[0])

    await gate.charge(key)
    assert (await level(1), await level(2)) == (1, 0)
    tokenized: Any = object()  # the request was read by a prompt process and therefore charged
    admitted = await gate.admit(make_demand(key, max_tokens=5, models=[model], tokenized=tokenized))
    assert (await level(1), await level(2)) == (1, 1)
    await gate.close(admitted, None)  # it never ran, but the charge remains
    assert (await level(1), await level(2)) == (1, 0)
    await gate.charge(key)
    await gate.charge(key)
    with pytest.raises(ApiError) as exc_info:
        await gate.charge(key)
    assert (exc_info.value.code, exc_info.value.status) == ("rate_limit_exceeded", 429)
    assert exc_info.value.retry_after
