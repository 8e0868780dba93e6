"""Sampling parameters of requests that do not set them: the option, the checkpoint's files, and the dialects."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest

from inference_worker.checkpoints.gguf_convert import sampling_of
from inference_worker.checkpoints.gguf_fields import Fields
from inference_worker.checkpoints.gguf_file import GGUFFile
from inference_worker.checkpoints.sampling_files import read_sampling_defaults
from inference_worker.contract.sampling_defaults import NAMES, format_sampling_defaults, parse_sampling_defaults
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.types import InferenceRequest
from millrace.gateway.dispatch.jobs import build_sampling_params
from millrace.gateway.protocols.anthropic.messages import read_messages
from millrace.gateway.protocols.openai.chat import read_chat
from millrace.gateway.protocols.openai.completions import read_completion
from millrace.gateway.protocols.responses.body import read_response
from tests.support.engine.sampling_values import values_beyond

DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
MODEL = ServedModel("m", None, 100, 1000, 0, sampling_defaults=tuple(DEFAULTS.items()))  # type: ignore[arg-type]
MESSAGES = {"messages": [{"role": "user", "content": "a"}]}
ALL = frozenset(NAMES)
READERS: dict[str, tuple[Callable[[bytes], InferenceRequest], dict[str, Any], frozenset[str]]] = {
    "chat": (read_chat, MESSAGES, ALL),
    "completions": (read_completion, {"prompt": "a"}, ALL),
    "responses": (read_response, {"input": "a"}, frozenset({"temperature", "top_p"})),
    "messages": (read_messages, MESSAGES | {"max_tokens": 5}, frozenset({"temperature", "top_p", "top_k"})),
}  # the reader, the other fields, and the parameters of the dialect


def build_params(reader: str, **values: Any) -> dict[str, Any]:
    read, fields, _ = READERS[reader]
    request = read(json.dumps({"model": "m", **fields, **values}).encode())
    admitted: Any = SimpleNamespace(demand=SimpleNamespace(request=request, model=MODEL), max_tokens=5)
    params = build_sampling_params(admitted)
    assert params.max_tokens == 5
    return {name: getattr(params, name) for name in NAMES}


@pytest.mark.parametrize("reader", READERS)
def test_a_request_takes_the_values_that_it_does_not_set(reader: str) -> None:
    assert build_params(reader) == DEFAULTS
    values = {"temperature": 0.9, "top_p": 0.5, "top_k": 7, "min_p": 0.2, "repetition_penalty": 1.5}
    for name in READERS[reader][2]:
        assert build_params(reader, **{name: values[name]}) == DEFAULTS | {name: values[name]}
        assert build_params(reader, **{name: None}) == DEFAULTS


@pytest.mark.parametrize(
    ("readers", "values"),
    [
        (("chat", "completions", "responses", "messages"), {"temperature": 0}),
        (("chat", "completions", "responses", "messages"), {"temperature": 1e-9}),
        (("chat", "completions", "responses", "messages"), {"top_p": 0}),
        (("chat", "completions", "messages"), {"top_k": 1}),
        (("chat", "completions"), {"seed": 3}),
    ],
)
def test_greedy_and_seeded_requests_take_no_defaults(readers: Sequence[str], values: dict[str, Any]) -> None:
    openai = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    for reader in readers:
        expected = openai | {name: value for name, value in values.items() if name in NAMES}
        assert build_params(reader, **values) == expected


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("auto", None),
        ("none", {}),
        ("temperature=0.6", {"temperature": 0.6}),
        (" top_k = 20 , min_p=0", {"top_k": 20, "min_p": 0.0}),
        ("repetition_penalty=1.05,top_p=0.8,top_k=20,temperature=0.7,min_p=0.1", None),
    ],
)
def test_the_option_is_read_and_written(text: str, values: dict[str, float] | None) -> None:
    defaults = parse_sampling_defaults(text)
    assert values is None or dict(defaults or ()) == values
    assert defaults is None or parse_sampling_defaults(format_sampling_defaults(defaults)) == defaults


@pytest.mark.parametrize(
    "text",
    [
        *("", "temperature", "temperature=", "temperature=hot", "top_k=1.5", "seed=1", "temperature=1,temperature=1"),
        *("temperature=0.5,", "temperature=0.5;top_p=1", "auto,none", "{}"),
        *(f"{name}={value}" for name in NAMES for value in values_beyond(name)),
    ],
)
def test_an_invalid_option_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"want auto, none, or name=value|is not a number|must be"):
        parse_sampling_defaults(text)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True}, "temperature=0.6,top_p=0.95,top_k=20"),
        ({"temperature": 1, "top_k": 50.0, "min_p": 0.05}, "temperature=1,top_k=50,min_p=0.05"),
        ({"top_k": -1, "min_p": 0}, "top_k=0,min_p=0"),
        # Values that no request may have, and other parameters, have no effect.
        ({"temperature": None, "top_p": "0.9", "top_k": True, "min_p": [0.1], "repetition_penalty": 0}, "none"),
        ({"temperature": 3.5, "top_p": float("nan"), "eos_token_id": 2, "seed": 1}, "none"),
    ],
)
def test_the_defaults_of_a_checkpoint(tmp_path: Path, values: dict[str, Any], found: str) -> None:
    assert read_sampling_defaults(tmp_path) == ()
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert format_sampling_defaults(read_sampling_defaults(tmp_path)) == found


def test_the_card_of_the_bundled_model_counts_as_its_files(tmp_path: Path) -> None:
    assert dict(read_sampling_defaults(tmp_path, "embedded")) == {"temperature": 0.2, "top_p": 0.9}
    assert read_sampling_defaults(tmp_path, "embedded:minilm") == ()


def test_the_defaults_of_a_gguf_file(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_float32("general.sampling.temp", 0.6)
    writer.add_int32("general.sampling.top_k", 20)
    writer.add_float32("general.sampling.penalty_repeat", 1.05)
    writer.add_string("general.sampling.sequence", "top_k;temp")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(tmp_path / "m.gguf") as file:
        assert sampling_of(Fields(file)) == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
