"""`cache_control` from Anthropic's request body, through the engine's pins, to Anthropic's usage. The engine uses the
test's clock."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import msgspec
import pytest

from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.messages import End
from inference_worker.contract.settings import ModelSpec
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.types import ResponseSpec
from millrace.gateway.protocols.anthropic.messages import read_count, read_messages
from millrace.gateway.protocols.anthropic.writer import MessagesWriter
from millrace.gateway.protocols.prompts import tokenize
from tests.support.engine.fakes import Clock, FakeRunner, distinct, fake_engine, request, run
from tests.support.models import models_data_dir

BLOCK = 16
WORDS = "apple pear plum cherry quince medlar " * 12
SHORT, LONG = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
WEATHER = {"name": "weather", "description": "Tells the weather", "input_schema": {"type": "object"}}
ANY: Any = None


class CountedTokens(NamedTuple):
    uncached: int
    written: int
    short: int
    long: int
    read: int


class Calls:
    """A model behind the translators."""

    def __init__(self, model: ServedModel) -> None:
        self.clock = Clock()
        self._model = model
        self._engine, _ = fake_engine(runner=FakeRunner(200), clock=self.clock)
        self._count = 0

    def __call__(self, **fields: Any) -> CountedTokens:
        body = {"model": "m", "messages": [{"role": "user", "content": "Which is the best?"}], **fields}
        prompt = asyncio.run(tokenize(self._model, read_messages(msgspec.json.encode({**body, "max_tokens": 1}))))
        counted = asyncio.run(tokenize(self._model, read_count(msgspec.json.encode(body))))
        usage = self._ask(prompt.ids, prompt.breakpoints)
        message = MessagesWriter(ResponseSpec("d", "req_1", "m", 1, 1), ANY).build_response(
            [End("req_1", 1, 0, "length", None, usage)]
        )
        classes, made = message["usage"], message["usage"]["cache_creation"]
        found = CountedTokens(
            classes["input_tokens"],
            classes["cache_creation_input_tokens"],
            made["ephemeral_5m_input_tokens"],
            made["ephemeral_1h_input_tokens"],
            classes["cache_read_input_tokens"],
        )
        assert found.uncached + found.written + found.read == len(counted.ids)
        assert found.written == found.short + found.long
        return found

    def crowd_out(self) -> None:
        """Evict every block that is not pinned."""
        self._ask([7], ())  # a step, in which expired pins end
        self._ask(distinct(BLOCK * self._engine.scheduler.cache.pool.num_free - 1, self._count + 1), ())

    def _ask(self, ids: list[int], breakpoints: Any) -> Any:
        self._count += 1
        name = f"call {self._count}"
        ids = [token % 1000 for token in ids]  # the fake runner has no other tokens
        self._engine.add_request(request(name, ids, breakpoints=breakpoints))
        return run(self._engine)[name][-1].usage


@pytest.fixture(scope="module")
def model() -> ServedModel:
    tokenizer = Tokenizer.from_dir(ensure_model(ModelSpec("m", "embedded", "auto"), models_data_dir()))
    return ServedModel("m", tokenizer, 2048, tokenizer.vocab_size, 0)


@pytest.fixture
def calls(model: ServedModel) -> Calls:
    return Calls(model)


def system(text: str, mark: dict[str, str]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "cache_control": mark}]


def test_a_write_a_read_and_an_expiry(calls: Calls) -> None:
    first = calls(system=system(WORDS, SHORT))
    assert first.short >= 5 * BLOCK
    assert (first.short % BLOCK, first.long, first.read) == (0, 0, 0)
    calls.clock.now = 299.0
    calls.crowd_out()
    hit = calls(system=system(WORDS, SHORT))
    assert hit == CountedTokens(first.uncached, 0, 0, 0, first.written)
    calls.clock.now = 599.0  # the read restarted the time, which is over now
    calls.crowd_out()
    assert calls(system=system(WORDS, SHORT)) == first


def test_two_breakpoints_cache_two_prefixes(calls: Calls) -> None:
    both = [*system(WORDS, LONG), *system(WORDS, SHORT)]
    first = calls(system=both)
    assert first.short >= 5 * BLOCK
    assert first.long >= 5 * BLOCK
    calls.clock.now = 301.0
    calls.crowd_out()
    again = calls(system=both)
    assert again == CountedTokens(first.uncached, first.short, first.short, 0, first.long)


def test_changed_tools_invalidate_the_cached_prompt(calls: Calls) -> None:
    first = calls(system=system(WORDS, SHORT), tools=[WEATHER])
    changed = calls(system=system(WORDS, SHORT), tools=[{**WEATHER, "name": "wind"}])
    assert changed.read < changed.written
    assert changed.written >= 5 * BLOCK
    again = calls(system=system(WORDS, SHORT), tools=[WEATHER])
    assert (again.written, again.read >= first.written) == (0, True)


def test_a_breakpoint_after_the_tools(calls: Calls) -> None:
    tools = [WEATHER, {**WEATHER, "name": "wind", "description": WORDS, "cache_control": LONG}]
    first = calls(system="Be brief.", tools=tools)
    assert first.long >= 5 * BLOCK
    calls.crowd_out()
    other = calls(system="Be kind, and long.", tools=tools)
    assert (other.written, other.read) == (0, first.long)
