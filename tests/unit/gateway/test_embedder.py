"""The texts that the semantic cache sends to its embedding deployment."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest

from inference_worker.contract.messages import Vectors
from millrace.gateway.answer_cache.embedder import QuestionEmbedder
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.protocols.prompt_bounds import max_characters
from tenants.keys.snapshot import ApiKeySnapshot, LimitSnapshot


class Tokenizer:
    longest_token_bytes = 1

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def encode(self, text: str) -> list[int]:
        self.lengths.append(len(text))
        return [1] * len(text)


async def test_a_text_that_cannot_fit_the_model_is_not_tokenized() -> None:
    key = ApiKeySnapshot(1, 1, 1, ("inference",), None, None, False, False, LimitSnapshot(), 1)
    tokenizer = Tokenizer()
    model = ServedModel("e", tokenizer, 10, 10, 0, vector_sizes=(3,), input_prompt="query: ")  # type: ignore[arg-type]
    router = SimpleNamespace(find_served=lambda _: model)
    embedder = QuestionEmbedder("e", router, None)  # type: ignore[arg-type]
    longest = max_characters(model) - len(model.input_prompt)
    assert await embedder.embed(key, "name", "x" * (longest + 1)) is None
    assert tokenizer.lengths == []
    assert await embedder.embed(key, "name", "x" * longest) is None  # too many tokens
    assert tokenizer.lengths == [max_characters(model)]


@pytest.mark.parametrize("is_operator_paid", [True, False])
async def test_the_execution_of_a_vector_has_the_payer_that_was_given(is_operator_paid: bool) -> None:
    key = ApiKeySnapshot(1, 1, 1, ("inference",), None, None, False, False, LimitSnapshot(), 1)
    model = ServedModel("e", Tokenizer(), 10, 10, 0, vector_sizes=(3,))  # type: ignore[arg-type]
    payers: list[bool] = []

    async def run(name: str, *args: Any, is_operator_paid: bool = False, **options: Any) -> tuple[None, list[Vectors]]:
        payers.append(is_operator_paid)
        return None, [Vectors(name, 1, 0, struct.pack("<3f", 0, 3, 4))]

    embedder = QuestionEmbedder("e", SimpleNamespace(find_served=lambda _: model), SimpleNamespace(run=run))  # type: ignore[arg-type]
    vector = await embedder.embed(key, "name", "text", is_operator_paid=is_operator_paid)
    assert vector is not None
    assert [round(float(number), 3) for number in vector] == [0, 0.6, 0.8]
    assert payers == [is_operator_paid]
