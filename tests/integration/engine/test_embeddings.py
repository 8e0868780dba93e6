"""Embeddings: vectors equal to transformers', and fair packing of inputs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize
from transformers import BertModel

from inference_worker.checkpoints.encoder_config import EncoderConfig
from inference_worker.checkpoints.model_config import ModelError
from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.engine_config import EngineConfig, QuantizationName
from inference_worker.contract.request import Request, RequestOutput, RequestRejected, SamplingParams, ServiceClass
from inference_worker.contract.settings import ModelSpec
from inference_worker.engine.embeddings.embedding_engine import EmbeddingEngine
from inference_worker.engine.embeddings.embedding_runner import EmbeddingRunner, Vectors
from tests.support.engine.make_embeddings import DATA, MINILM, mean_states, texts


@pytest.fixture(scope="module")
def minilm() -> Path:
    return ensure_model(MINILM, Path())


@pytest.fixture
def copy(minilm: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(minilm, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "model.safetensors").symlink_to(minilm / "model.safetensors")
    return folder


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def request(
    name: str,
    lengths: Sequence[int],
    tenant: str = "",
    service_class: ServiceClass = ServiceClass.DEFAULT,
    expires_at: float | None = None,
) -> Request:
    """Return a request with inputs of these lengths. Each input repeats one token, its position from 1 on."""
    tokens = [n for n, length in enumerate(lengths, 1) for _ in range(length)]
    params = SamplingParams(max_tokens=0)
    return Request(
        name, tokens, params, tenant=tenant, service_class=service_class, expires_at=expires_at,
        input_lengths=tuple(lengths),
    )  # fmt: skip


def vectors(output: RequestOutput) -> Vectors:
    usage = output.usage
    assert usage is not None
    return np.frombuffer(output.vectors, "<f4")


def embed(engine: EmbeddingEngine, inputs: Sequence[Sequence[int]]) -> RequestOutput:
    tokens = [token for each in inputs for token in each]
    engine.add_request(Request("r", tokens, input_lengths=tuple(map(len, inputs))))
    outputs: list[RequestOutput] = []
    while engine.has_unfinished():
        outputs += engine.step()
    (output,) = outputs
    return output


def distances(ours: RequestOutput, theirs: torch.Tensor) -> torch.Tensor:
    """Return the cosine distances of normalized vectors."""
    found = torch.from_numpy(vectors(ours).reshape(len(theirs), -1).astype(np.float64))
    assert float((found.norm(dim=1) - 1).abs().max()) < 1e-6
    return 1 - (normalize(found) * normalize(theirs.double())).sum(1)


@pytest.mark.timeout(300)
def test_the_vectors_of_500_texts_equal_transformers(minilm: Path) -> None:
    tokenizer = Tokenizer.from_dir(minilm)
    inputs = [tokenizer.encode(text) for text in texts()]
    output = embed(EmbeddingEngine(EngineConfig(model_dir=minilm)), inputs)
    reference = torch.from_numpy(np.load(DATA / "reference.npy"))
    assert len(inputs) == len(reference) == 500
    assert float(distances(output, reference).max()) < 1e-6
    assert output.usage is not None
    assert output.usage.uncached == sum(map(len, inputs))


def test_the_reference_vectors_are_current(minilm: Path) -> None:
    inputs = [Tokenizer.from_dir(minilm).encode(text) for text in texts()[::25]]
    want = mean_states(BertModel.from_pretrained(minilm).eval(), inputs)
    output = embed(EmbeddingEngine(EngineConfig(model_dir=minilm)), inputs)
    assert float(distances(output, want).max()) < 1e-9


def test_the_embedded_models_properties(minilm: Path) -> None:
    config = EncoderConfig.from_dir(minilm)
    assert (config.num_layers, config.hidden_size, config.num_heads, config.max_model_len) == (6, 384, 12, 256)
    assert (config.pooling, config.normalize, config.shorter, config.prompt) == ("mean", True, (), "")


@pytest.mark.parametrize(("quantization", "least"), [("int8", 0.999), ("int4", 0.95)])
def test_the_vectors_of_quantized_weights_are_close(minilm: Path, quantization: QuantizationName, least: float) -> None:
    inputs = [Tokenizer.from_dir(minilm).encode(text) for text in texts()[:16]]
    want, got = (
        EmbeddingRunner(EngineConfig(minilm, quantization=name), EncoderConfig.from_dir(minilm)).embed(inputs)
        for name in ("none", quantization)
    )
    cosines = (want * got).sum(1)
    assert least < cosines.min() < cosines.max() < 1 - 1e-6


def test_the_default_prompt_is_read(copy: Path) -> None:
    changes = {"default_prompt_name": "query", "prompts": {"query": "search: ", "document": ""}}
    (copy / "config_sentence_transformers.json").write_text(json.dumps(changes))
    assert EncoderConfig.from_dir(copy).prompt == "search: "


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        ("config.json", {"hidden_act": "relu"}, "hidden_act"),
        ("config.json", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("config.json", {"num_attention_heads": 7}, "7 heads"),
        ("config.json", {"architectures": ["BertModel", "x"]}, "architectures"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
        ("sentence_bert_config.json", {"max_seq_length": -1}, "max_seq_length"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query", "prompts": {}}, "query"),
    ],
)
def test_unsupported_configurations_are_rejected(
    copy: Path, tmp_path: Path, file: str, changes: dict[str, object], said: str
) -> None:
    edit(copy / file, **changes)
    with pytest.raises(ModelError, match=said):
        ensure_model(ModelSpec("m", str(copy), "auto"), tmp_path)


@pytest.mark.parametrize(
    "modules", ["{}", "[1]", "[", '[{"type": "x.Dense"}]', '[{"type": "x.Pooling", "path": "../x"}]']
)
def test_an_invalid_list_of_modules_is_rejected(copy: Path, tmp_path: Path, modules: str) -> None:
    (copy / "modules.json").write_text(modules)
    with pytest.raises(ModelError, match=r"modules\.json"):
        ensure_model(ModelSpec("m", str(copy), "auto"), tmp_path)


# The engine with a fake model.


class FakeEmbedder:
    """A fake model: each input's vector is its first token and its length."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []  # lengths of the inputs
        self.broken = False

    def embed(self, inputs: Sequence[Sequence[int]], second_starts: Sequence[int] | None = None) -> Vectors:
        assert second_starts is None
        self.steps.append([len(each) for each in inputs])
        if self.broken:
            raise RuntimeError("broken")
        return np.array([[each[0], len(each)] for each in inputs], dtype=np.float32)


class Harness:
    def __init__(self, minilm: Path, max_num_batched_tokens: int = 256) -> None:
        self.now = 100.0
        self.embedder = FakeEmbedder()
        config = EngineConfig(model_dir=minilm, max_num_batched_tokens=max_num_batched_tokens)
        self.engine = EmbeddingEngine(config, runner=self.embedder, clock=lambda: self.now)

    def run(self) -> dict[str, RequestOutput]:
        """Run steps until all requests are complete; return their last outputs in the order of their ends."""
        ended: dict[str, RequestOutput] = {}
        while self.engine.has_unfinished():
            ended.update({output.request_id: output for output in self.engine.step()})
        return ended


@pytest.fixture
def harness(minilm: Path) -> Harness:
    return Harness(minilm)


def test_vectors_are_in_the_order_of_the_inputs(harness: Harness) -> None:
    harness.engine.add_request(request("a", [5, 200, 90, 7, 200]))
    harness.engine.add_request(request("b", [3]))
    ended = harness.run()
    assert vectors(ended["a"]).reshape(-1, 2).tolist() == [[1, 5], [2, 200], [3, 90], [4, 7], [5, 200]]
    assert vectors(ended["b"]).tolist() == [1, 3]
    assert all(sum(step) <= 256 for step in harness.embedder.steps)
    assert ended["a"].usage is not None
    assert ended["a"].usage.uncached == 502


def test_many_short_inputs_fill_a_step(harness: Harness) -> None:
    for n in range(40):
        harness.engine.add_request(request(f"r{n}", [8]))
    harness.run()
    assert [len(step) for step in harness.embedder.steps] == [32, 8]


def test_a_tenant_with_one_text_overtakes_one_with_thousands(harness: Harness) -> None:
    harness.engine.add_request(request("many", [100] * 200, tenant="big"))
    harness.engine.step()
    harness.engine.add_request(request("one", [20], tenant="small"))
    assert "one" in [output.request_id for _ in range(2) for output in harness.engine.step()]


def test_the_batch_class_gets_the_remaining_capacity(harness: Harness) -> None:
    harness.engine.add_request(request("batch", [50] * 40, service_class=ServiceClass.BATCH))
    harness.engine.add_request(request("now", [100] * 6))
    assert list(harness.run()) == ["now", "batch"]
    assert harness.embedder.steps[0] == [100, 100]


def test_an_aborted_request_is_billed_for_computed_inputs(harness: Harness) -> None:
    harness.engine.add_request(request("a", [100] * 10))
    harness.engine.step()
    output = harness.engine.abort("a")
    assert output is not None
    assert output.finish_reason == "cancelled"
    assert output.usage is not None
    assert (output.usage.uncached, output.vectors) == (200, b"")
    assert not harness.engine.has_unfinished()
    assert harness.engine.abort("a") is None


def test_a_failed_step_ends_only_its_own_requests(harness: Harness) -> None:
    harness.engine.add_request(request("in", [100] * 4, tenant="x"))
    harness.engine.add_request(request("out", [100], tenant="y", service_class=ServiceClass.BATCH))
    harness.embedder.broken = True
    (output,) = harness.engine.step()
    assert (output.request_id, output.error and output.error.code) == ("in", "internal_error")
    harness.embedder.broken = False
    assert harness.run()["out"].finish_reason == "stop"


def test_expired_requests_are_dropped(harness: Harness) -> None:
    harness.engine.add_request(request("late", [10], service_class=ServiceClass.BATCH, expires_at=110.0))
    harness.now = 111.0
    (output,) = harness.engine.step()
    assert output.error is not None
    assert output.error.code == "request_expired"
    assert not harness.engine.has_unfinished()


@pytest.mark.parametrize(
    ("lengths", "tokens", "code"),
    [
        ((), [1], "invalid_value"),
        ((1, 0), [1], "invalid_prompt"),
        ((2,), [1], "invalid_prompt"),
        ((257,), [1] * 257, "context_length_exceeded"),
        ((1,), [30_522], "invalid_prompt"),
    ],
)
def test_inputs_that_can_never_be_embedded_are_rejected(
    harness: Harness, lengths: tuple[int, ...], tokens: list[int], code: str
) -> None:
    with pytest.raises(RequestRejected) as exc_info:
        harness.engine.add_request(Request("r", tokens, input_lengths=lengths))
    assert exc_info.value.code == code
    assert not harness.engine.has_unfinished()


def test_metrics_add_up(harness: Harness) -> None:
    harness.engine.add_request(request("a", [5, 6]))
    harness.engine.add_request(request("b", [7]))
    harness.engine.abort("b")
    harness.run()
    counters = harness.engine.metrics.snapshot().counters
    assert counters["vllm:prompt_tokens"] == {"": 11}
    assert counters["vllm:request_success"] == {"stop": 1, "abort": 1, "error": 0}
    assert counters["millrace_engine_tokens"] == {"uncached": 11}
