"""Published GGUF files: tokens of the original libraries, and outputs of transformers in float32."""

from __future__ import annotations

import gc
import struct
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import tiktoken
import torch

from inference_worker.checkpoints.gguf_file import GGUFFile
from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.checkpoints.tokenizer_convert import QWEN as QWEN_PATTERN
from inference_worker.contract.engine_config import EngineConfig
from inference_worker.contract.request import Request, RequestOutput, SamplingParams
from inference_worker.contract.settings import ModelSpec
from inference_worker.engine.engine import LLMEngine
from tests.support.engine.fakes import run, tokens_of
from tests.support.engine.real_models import GEMMA, MODELS, QWEN, RealModel

pytestmark = pytest.mark.timeout(900)

TEXTS = [
    "The reset button is on the back. Press it for five seconds, then wait.",
    "Once upon a time, in a small village by the sea,",
    "The capital of France is",
    "It's don't they'll I'VE we'd",
    "Il était une fois, dans une forêt très éloignée, un petit renard.",
    "Der Fuchs springt über den faulen Hund. Größe: 12,5 m²",
    "Привет, мир! Съешь ещё этих мягких французских булок.",
    "Ελληνικά, עברית, العربية, हिन्दी, ไทย",
    "日本語のテキストです。漢字とかなが混ざっています。",
    "中文测试:一二三四五,上山打老虎。",
    "한국어 문장입니다. 오늘은 날씨가 좋아요.",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇨🇭 👍🏽 🤷‍♂️",
    "1234567890 3.14159 1e-5 ２０２４ 100,000",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    'for (int i = 0; i < 10; i++) {\n\tprintf("%d\\n", i);\n}\n',
    '{"name": "Ada", "tags": ["a", "b"], "nested": {"x": null}}',
    "SELECT name, COUNT(*) FROM users WHERE id >= 42 GROUP BY 1;",
    "  leading,  double   and trailing spaces   ",
    "\n\n\nlines\n\n and\ttabs\t\t\r\n mixed \n",
    " ",
    "<div class='a'>&nbsp;</div> <!-- x --> <unused> </s>",
    "naïve café — “quotes” … ﬁ ﬂ e\u0301 \u200b\ufeff",
    "\x00\x01 \x7f \ud7ff \U0010fffd",
    "https://example.com/a?b=c&d=%20#e user@example.com C:\\Windows",
]
PROMPTS = TEXTS[:8]
NEW_TOKENS = 16
LOGPROBS, PROMPT_LOGPROBS = 5, 1
NEAR_TIE = 2e-3  # if two logits are closer than this, either token may be the best one
MAX_ERROR = 2e-3  # of a log-probability


def sentencepiece_ids(fields: dict[str, Any]) -> Callable[[str], list[int]]:
    """Return the tokenizer of the SentencePiece library with the pieces of a file."""
    model = b""
    for token_id, (text, score, kind) in enumerate(
        zip(fields["tokens"], fields["scores"], fields["token_type"], strict=True)
    ):
        if kind == gguf.TokenType.USER_DEFINED:
            text = text.replace(" ", "▁")
        if token_id == fields["unknown_token_id"]:
            kind = gguf.TokenType.UNKNOWN
        model += _field(1, _field(1, text.encode()) + _field(2, struct.pack("<f", score)) + _field(3, kind))
    ids = {40: "unknown", 41: "bos", 42: "eos", 43: "padding"}
    trainer = _field(3, 2) + _field(35, 1)  # BPE with bytes
    for number, name in ids.items():
        token_id = fields[f"{name}_token_id"]
        trainer += _field(number, token_id) + _field(number + 5, fields["tokens"][token_id].encode())
    normalizer = _field(1, b"identity") + _field(3, 0) + _field(4, 0) + _field(5, 1)  # it keeps and escapes spaces
    model += _field(2, trainer) + _field(3, normalizer)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return lambda text: list(processor.encode(text))


def _field(number: int, value: int | bytes) -> bytes:
    """Return a field of a protobuf message. Four bytes in the place of a score are a number of 32 bits."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    if number == 2 and len(value) == 4:
        return _varint(number << 3 | 5) + value
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    found = b""
    while value > 0x7F:
        found += bytes([value & 0x7F | 0x80])
        value >>= 7
    return found + bytes([value])


def tiktoken_ids(fields: dict[str, Any]) -> Callable[[str], list[int]]:
    """Return the tokenizer of tiktoken with the tokens of a file, whose ids are their ranks."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in visible]
    letters = {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(others)}
    ranks = {
        bytes(letters[letter] for letter in text): token_id
        for token_id, (text, kind) in enumerate(zip(fields["tokens"], fields["token_type"], strict=True))
        if kind == gguf.TokenType.NORMAL
    }
    encoding = tiktoken.Encoding("test", pat_str=QWEN_PATTERN, mergeable_ranks=ranks, special_tokens={})
    return lambda text: encoding.encode(unicodedata.normalize("NFC", text))


ORIGINALS = {GEMMA: sentencepiece_ids, QWEN: tiktoken_ids}


@dataclass(frozen=True)
class Converted:
    """A converted file."""

    file: Path
    directory: Path
    tokenizer: Tokenizer


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model.name)
def model(request: pytest.FixtureRequest) -> RealModel:
    found: RealModel = request.param
    return found


@pytest.fixture(scope="module")
def converted(model: RealModel, files: dict[str, Path], converted_models: Path) -> Converted:
    file = files[model.name]
    directory = ensure_model(ModelSpec(model.name, str(file), "auto"), converted_models)
    return Converted(file, directory, Tokenizer.from_dir(directory))


@pytest.fixture(scope="module")
def outputs(converted: Converted) -> dict[str, list[RequestOutput]]:
    """Return the engine's greedy outputs, with the log-probabilities of prompts and outputs."""
    config = EngineConfig(converted.directory, dtype="float32", device="cpu", num_blocks=400, measure_peaks=False)
    engine = LLMEngine(config)
    params = SamplingParams(
        max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=LOGPROBS, prompt_logprobs=PROMPT_LOGPROBS
    )
    for prompt in PROMPTS:
        engine.add_request(Request(prompt, converted.tokenizer.encode(prompt), params))
    return run(engine)


@pytest.fixture(scope="module")
def reference(model: RealModel, converted: Converted, outputs: object) -> Iterator[Any]:
    """Return transformers' model of the file in float32, with weights that are rounded to bfloat16 as converted ones.

    The package gguf has decoded them, and transformers has read the configuration from the file.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(converted.file.parent, gguf_file=converted.file.name)
    found = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    reader = gguf.GGUFReader(converted.file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    architecture = reader.fields["general.architecture"].contents()
    number = next(key for key, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            stem, _, kind = name.rpartition(".")
            tensor = tensors.pop(f"{names.get_name(stem)}.{kind}")
            values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
            if model is GEMMA and stem.endswith("norm"):
                values -= 1  # the file has the factors
            parameter.copy_(values.bfloat16().float())
    assert not tensors
    yield found
    del found
    gc.collect()


def test_tokens_are_those_of_the_original_library(model: RealModel, converted: Converted) -> None:
    with GGUFFile(converted.file) as file:
        fields = {name.removeprefix("tokenizer.ggml."): value for name, value in file.fields.items()}
    original = ORIGINALS[model](fields)
    assert len(TEXTS) == 24
    for text in TEXTS:
        ids = converted.tokenizer.encode(text, add_special_tokens=False)
        assert ids == original(text), text
        assert converted.tokenizer.decode(ids) == (unicodedata.normalize("NFC", text) if model is QWEN else text)
        assert streamed(converted.tokenizer, ids) == converted.tokenizer.decode(ids)
    begins = [fields["bos_token_id"]] if fields.get("add_bos_token") else []
    assert converted.tokenizer.encode("a") == [*begins, *original("a")]


def streamed(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    text = tokenizer.detokenizer(SamplingParams())
    return "".join([text.push(token) for token in ids]) + text.flush()


def test_outputs_and_log_probabilities_are_those_of_transformers(
    converted: Converted, outputs: dict[str, list[RequestOutput]], reference: Any
) -> None:
    errors: list[float] = []
    for prompt in PROMPTS:
        ids, found = converted.tokenizer.encode(prompt), tokens_of(outputs[prompt])
        assert len(found) == NEW_TOKENS
        with torch.inference_mode():
            logits = reference(torch.tensor([ids + found])).logits[0]
        scores = logits.log_softmax(-1)
        for place, token in enumerate(found, len(ids) - 1):
            assert float(logits[place].max() - logits[place, token]) < NEAR_TIE, (prompt, place)
        first = outputs[prompt][0].prompt_logprobs or []
        entries = [*first, *(entry for output in outputs[prompt] for entry in output.logprobs)]
        assert len(entries) == len(ids) - 1 + NEW_TOKENS
        for place, entry in enumerate(entries):
            assert len(entry.top) == (PROMPT_LOGPROBS if place < len(first) else LOGPROBS)
            for token, logprob in [(entry.token_id, entry.logprob), *entry.top]:
                errors.append(abs(logprob - float(scores[place, token])))
    assert max(errors) < MAX_ERROR
