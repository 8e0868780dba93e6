"""Chat templates on the event loop: only those that a prompt process measured as cheap, and only with little work."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from inference_worker.checkpoints.chat_template import ChatTemplate
from inference_worker.checkpoints.tokenizer import Tokenizer
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest, Prompt
from millrace.gateway.prompt_processes import prompt_pool
from millrace.gateway.prompt_processes.prompt_pool import PromptPool
from millrace.gateway.prompt_processes.prompt_reader import PromptReader
from millrace.gateway.protocols.openai import chat
from millrace.gateway.protocols.prompts import tokenize
from millrace.gateway.routing.router import Router
from tenants.keys.snapshot import ApiKeySnapshot, LimitSnapshot
from tests.support.engine.tiny_tokenizer import write_tokenizer
from tests.support.waiting import eventually_async

DOUBLING = "{% macro m(k) %}{% if k %}{{ m(k - 1) }}{{ m(k - 1) }}{% endif %}{% endmacro %}"
TEMPLATES = {
    "cheap": "{% for message in messages %}{{ message.content }}{% endfor %}",
    "endless": DOUBLING + "{{ m(60) }}",
    # Cheap for every conversation except one.
    "endless later": DOUBLING + "{% if messages[0].content == 'now' %}{{ m(60) }}{% endif %}x",
    "slow later": DOUBLING + "{% if messages[0].content == 'now' %}{{ m(10) }}{% endif %}x",
}


class Charges:
    """A fake admission that counts charges."""

    def __init__(self) -> None:
        self.number = 0

    async def charge(self, key: ApiKeySnapshot) -> None:
        self.number += 1


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ServedModel]:
    return {name: make_model(name, tmp_path_factory.mktemp("model")) for name in TEMPLATES}


def make_model(name: str, directory: Path) -> ServedModel:
    write_tokenizer(directory, (), TEMPLATES[name])
    tokenizer = Tokenizer.from_dir(directory)
    return ServedModel(name, tokenizer, 512, tokenizer.vocab_size, 0, directory=directory)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(models: dict[str, ServedModel]) -> AsyncIterator[PromptPool]:
    """One process, which has measured all templates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_pool, "WAIT_SECONDS", 60)
        patch.setattr(prompt_pool, "WORK_SECONDS", 60)
        found = PromptPool(models, 1)
        await found.start()
        await eventually_async(lambda: all(model.tokenizer.is_template_cheap is not None for model in models.values()))
        yield found
        await found.stop()


with_pool = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def charges() -> Charges:
    return Charges()


@pytest.fixture
def reader(models: dict[str, ServedModel], pool: PromptPool, charges: Charges) -> PromptReader:
    return PromptReader(Router(models), charges, pool, 2**20, "reject")  # type: ignore[arg-type]


@pytest.fixture
def rendered_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The first message of each conversation that this process renders."""
    found: list[str] = []
    render = ChatTemplate.render

    def record(self: ChatTemplate, messages: list[dict[str, Any]], *args: Any, **kwargs: Any) -> str:
        found.append(messages[0]["content"])
        return render(self, messages, *args, **kwargs)

    monkeypatch.setattr(ChatTemplate, "render", record)
    return found


def key_of(tenant: int) -> ApiKeySnapshot:
    return ApiKeySnapshot(1, tenant, 1, ("inference",), None, None, False, False, LimitSnapshot(()), 1)


async def read(reader: PromptReader, model: str, content: str, tenant: int = 1) -> InferenceRequest:
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 8}
    return await reader.read(key_of(tenant), chat.DIALECT, msgspec.json.encode(body))


async def prompt_of(
    reader: PromptReader, models: dict[str, ServedModel], model: str, content: str, tenant: int = 1
) -> Prompt:
    return await tokenize(models[model], await read(reader, model, content, tenant))


@with_pool
async def test_templates_are_measured_in_a_prompt_process(models: dict[str, ServedModel], pool: PromptPool) -> None:
    measured = {name: model.tokenizer.is_template_cheap for name, model in models.items()}
    assert measured == {"cheap": True, "endless": False, "endless later": True, "slow later": True}


@with_pool
async def test_a_cheap_template_is_rendered_on_the_event_loop(
    reader: PromptReader, models: dict[str, ServedModel], rendered_here: list[str], charges: Charges
) -> None:
    assert (await prompt_of(reader, models, "cheap", "Hello")).ids == models["cheap"].tokenizer.encode("Hello")
    assert (rendered_here, charges.number) == (["Hello"], 0)


@with_pool
async def test_an_expensive_template_delays_no_other_tenant(
    reader: PromptReader, models: dict[str, ServedModel], rendered_here: list[str], charges: Charges
) -> None:
    attacks = [asyncio.create_task(prompt_of(reader, models, "endless", "attack")) for _ in range(4)]
    for number in range(20):
        await prompt_of(reader, models, "cheap", f"other {number}", tenant=2)
    results = await asyncio.gather(*attacks, return_exceptions=True)
    assert [(type(each), getattr(each, "status", 0)) for each in results] == [(ApiError, 400)] * 4
    assert "too much work" in str(results[0])
    assert rendered_here == [f"other {number}" for number in range(20)]
    assert charges.number == 4


@with_pool
async def test_a_template_that_becomes_expensive_stops_on_the_event_loop(
    reader: PromptReader, models: dict[str, ServedModel], rendered_here: list[str]
) -> None:
    assert (await prompt_of(reader, models, "slow later", "now")).num_tokens == 1  # a prompt process finished it
    assert rendered_here == ["now"]
    with pytest.raises(ApiError, match="too much work"):
        await prompt_of(reader, models, "endless later", "now")
    assert rendered_here == ["now", "now"]


@with_pool
async def test_a_template_that_is_not_measured_yet_is_rendered_in_a_prompt_process(
    reader: PromptReader, models: dict[str, ServedModel], rendered_here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models["cheap"].tokenizer, "is_template_cheap", None)
    assert (await prompt_of(reader, models, "cheap", "Hello")).num_tokens == 5
    assert rendered_here == []


async def test_a_process_that_hangs_in_a_measurement_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_pool, "WORK_SECONDS", 0.5)
    models = {"cheap": make_model("cheap", tmp_path)}
    pool = PromptPool(models, 1)
    starting = prompt_pool._Process.exchange

    async def stop_process(self: Any, work: bytes, body: bytes) -> Any:
        os.kill(self._process.pid, signal.SIGSTOP)
        monkeypatch.setattr(prompt_pool._Process, "exchange", starting)
        return await starting(self, work, body)

    monkeypatch.setattr(prompt_pool._Process, "exchange", stop_process)
    await pool.start()
    try:
        await eventually_async(lambda: models["cheap"].tokenizer.is_template_cheap is not None)
        assert models["cheap"].tokenizer.is_template_cheap is False
        await eventually_async(lambda: pool.is_current)
    finally:
        await pool.stop()


async def test_another_template_of_a_served_version_is_not_measured_by_processes_with_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_pool, "WORK_SECONDS", 60)
    for name in ("earlier", "later"):
        (tmp_path / name).mkdir()
    earlier = make_model("cheap", tmp_path / "earlier")
    later = replace(make_model("endless", tmp_path / "later"), name="cheap")
    pool = PromptPool({"cheap": earlier}, 1)
    await pool.start()
    try:
        await eventually_async(lambda: earlier.tokenizer.is_template_cheap)
        pool.replace_models([earlier, later])
        await eventually_async(lambda: later.tokenizer.is_template_cheap is not None)
        assert later.tokenizer.is_template_cheap is False
    finally:
        await pool.stop()
