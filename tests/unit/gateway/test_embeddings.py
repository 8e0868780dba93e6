"""Embeddings in the gateway: parsing of bodies, writing of vectors, and prompts with many inputs."""

from __future__ import annotations

import base64
import dataclasses
import math
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import CreateEmbeddingResponse

from inference_worker.checkpoints.input_encoder import EncodedInput, InputLimit
from inference_worker.contract.messages import AnswerEvent, BillingContext, End, Heartbeat, InferenceJob, Vectors
from inference_worker.contract.request import SamplingParams, TokenCounts
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest, ResponseSpec
from millrace.gateway.dispatch.placement import Placement
from millrace.gateway.dispatch.replicas import ReplicaRegistry
from millrace.gateway.protocols.openai.embeddings import EmbeddingsWriter, read_embeddings
from millrace.gateway.protocols.prompts import tokenize


class Letters:
    """A tokenizer with a token for each letter, by its position in the alphabet, and without special tokens."""

    longest_token_bytes = 1

    @property
    def inputs(self) -> Letters:
        return self

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 96 for letter in text if letter.isalpha()]

    def encode_text(self, text: str, limit: InputLimit) -> EncodedInput:
        return EncodedInput(self.encode(text)[: limit.max_tokens])

    def truncate_ids(self, ids: list[int], limit: InputLimit) -> EncodedInput:
        return EncodedInput(ids[: limit.max_tokens])


MODEL = ServedModel("m", Letters(), 8, 27, 0, vector_sizes=(2, 4))  # type: ignore[arg-type]


def read(**fields: Any) -> InferenceRequest:
    return read_embeddings(msgspec.json.encode({"model": "m", "input": "a", **fields}))


def write(vectors: list[list[float]], **asked: Any) -> dict[str, Any]:
    data = b"".join(struct.pack(f"<{len(vector)}f", *vector) for vector in vectors)
    request = read(input=["x"] * len(vectors), **asked)
    form = ResponseSpec("openai.embedding", "req_1", "m", 0, 7, echoed_parameters=request.echoed_parameters)
    events: list[AnswerEvent] = [Vectors("req_1", 1, 0, data), End("req_1", 1, 1, "stop", None, TokenCounts(7))]
    return EmbeddingsWriter(form, None).build_response(events)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("a b", ("a b",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ([1, 2],)),
        ([[1], [2, 3]], ([1], [2, 3])),
        (["a", [1]], ("a", [1])),
    ],
)
def test_an_input_has_four_forms(given: Any, inputs: tuple[Any, ...]) -> None:
    assert read(input=given).encoder.inputs == inputs


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5))
def test_errors_name_the_invalid_parameter(value: Any) -> None:
    try:
        assert all(read(input=value).encoder.inputs)
    except ApiError as exc:
        assert (exc.status, (exc.param or "")[:5]) == (400, "input")


def test_vectors_are_in_the_inputs_order() -> None:
    answer = write([[1, 0], [0, 0.5]])
    assert [item["embedding"] for item in answer["data"]] == [[1, 0], [0, 0.5]]
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert CreateEmbeddingResponse.model_validate(answer, strict=True).data[1].index == 1


def test_base64_encodes_the_same_numbers() -> None:
    (each,) = write([[0.25, -1.5]], encoding_format="base64")["data"]
    assert struct.unpack("<2f", base64.b64decode(each["embedding"])) == (0.25, -1.5)


@pytest.mark.parametrize("vector", [[3.0, 4.0, 12.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
def test_a_shortened_vector_is_normalized_again(vector: list[float]) -> None:
    (each,) = write([vector], dimensions=2)["data"]
    length = math.hypot(*vector[:2]) or 1.0
    assert each["embedding"] == pytest.approx([x / length for x in vector[:2]], abs=1e-7)


def test_a_resumed_request_gets_all_vectors_at_the_end() -> None:
    form = ResponseSpec("openai.embedding", "req_1", "m", 0, 1, echoed_parameters=read().echoed_parameters)
    writer = EmbeddingsWriter(form, None)  # type: ignore[arg-type]
    assert writer.stream(Vectors("req_1", 1, 0, struct.pack("<f", 1.0))) == []
    whole, done = writer.stream(End("req_1", 1, 1, "stop", None, TokenCounts(1)))
    assert msgspec.json.decode(whole)["data"][0]["embedding"] == [1.0]
    assert done == b"[DONE]"


async def test_a_prompt_is_the_concatenation_of_its_inputs() -> None:
    prompt = await tokenize(MODEL, read(input=["abc", [26], "d e"]))
    assert (prompt.ids, prompt.input_lengths) == ([1, 2, 3, 26, 4, 5], (3, 1, 2))
    long = await tokenize(MODEL, read(input=["abcdefgh"] * 1000))
    assert long.input_lengths == (8,) * 1000


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": ["ab", "?!"]}, "input", "invalid_value"),
        ({"input": "abcdefghi", "truncate": False}, "input", "context_length_exceeded"),
        ({"input": [[1], [27]]}, "input", "invalid_value"),
        ({"input": [-1]}, "input", "invalid_value"),
        ({"dimensions": 3}, "dimensions", "invalid_value"),
    ],
)
async def test_inputs_that_the_model_cannot_process_are_rejected(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as exc_info:
        await tokenize(MODEL, read(**fields))
    assert (exc_info.value.status, exc_info.value.param, exc_info.value.code) == (400, param, code)


async def test_the_models_prompt_precedes_texts() -> None:
    prompt = await tokenize(dataclasses.replace(MODEL, input_prompt="z: "), read(input=["abc", [1]]))
    assert (prompt.ids, prompt.input_lengths) == ([26, 1, 2, 3, 1], (4, 1))


async def test_a_model_is_rejected_at_the_wrong_endpoint() -> None:
    answers = ServedModel("a", Letters(), 8, 27, 0)  # type: ignore[arg-type]
    for model, request in ((answers, read()), (MODEL, InferenceRequest("m", "abc", SamplingParams()))):
        with pytest.raises(ApiError) as exc_info:
            await tokenize(model, request)
        assert (exc_info.value.status, exc_info.value.param) == (400, "model")


def test_embeddings_have_no_preferred_replica() -> None:
    board = ReplicaRegistry()
    for beat in (1, 2):
        beats = {
            name: msgspec.msgpack.encode(Heartbeat(beat, "m", True, False, load, 0, 8, 0, 0))
            for name, load in ((b"busy", 3), (b"idle", 0))
        }
        board.update(beats)
    placement = Placement(board)
    placement.observe()
    for first in range(20):
        billing_context = BillingContext(0, "req_1", 0, 1, 1, 1, "m")
        job = InferenceJob(
            billing_context, "gw", [first] * 100, SamplingParams(max_tokens=0), b"", 0.0, input_lengths=(50, 50)
        )
        choice = placement.choose(job)
        assert choice is not None
        assert (choice.replica_id, choice.by) == ("idle", "load")
