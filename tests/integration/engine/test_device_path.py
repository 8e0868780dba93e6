"""The path of a step to a device and back, with a small model and a fake device stream: the order of copies, and equal
outputs of asynchronous and synchronous steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.request import Request, RequestOutput, SamplingParams, StructuredSpec
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.sampling import penalties
from inference_worker.engine.tensors import pack, packed_size, unpack
from tests.support.engine.device_stream import DeviceStream
from tests.support.engine.fakes import run
from tests.support.engine.tiny_model import tiny_engine

SCHEMA = '{"type": "array", "items": {"enum": ["a", "b", 1, true]}, "minItems": 3, "maxItems": 9}'
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seed": {"seed": 5, "logprobs": 2},
    "top_p": {"seed": 6, "top_p": 0.8, "top_k": 40},
    "frequency": {"temperature": 0.0, "frequency_penalty": 1.5, "logprobs": 0},
    "presence": {"seed": 8, "presence_penalty": -2.0},
    "repetition": {"seed": 9, "repetition_penalty": 1.3},
    "bias": {"temperature": 0.0, "logit_bias": ((7, 5.0), (9, -5.0)), "min_tokens": 4},
    "choices": {"seed": 10, "n": 3, "logprobs": 1, "presence_penalty": 1.0},
    "prompt": {"temperature": 0.0, "prompt_logprobs": 1},
    "grammar": {"seed": 11, "logprobs": 1, "ignore_eos": False},
    "grammar and penalty": {"seed": 12, "frequency_penalty": 0.7, "ignore_eos": False},
}


def requests(**more: Any) -> list[Request]:
    made = []
    for number, (name, kind) in enumerate(KINDS.items()):
        prompt = [100 + (7 * number + 3 * i) % 4000 for i in range(20 + number)]
        params = SamplingParams(**{"max_tokens": 14, "ignore_eos": True, **kind, **more})
        made.append(Request(name, prompt, params, structured=_form(name)))
    return made


def _form(name: str) -> StructuredSpec | None:
    return StructuredSpec("json_schema", SCHEMA) if name.startswith("grammar") else None


Contents = dict[tuple[str, int], list[tuple[Any, ...]]]


def outputs_of(engine: LLMEngine, wanted: list[Request]) -> Contents:
    """Return what each choice of the requests outputs: tokens, text, log-probabilities, and how it ends."""
    for request in wanted:
        engine.add_request(request)
    found: Contents = {}
    for name, outputs in run(engine).items():
        for output in outputs:
            found.setdefault((name, output.index), []).append(_content(output))
    return found


def _content(output: RequestOutput) -> tuple[Any, ...]:
    assert output.error is None
    entries = [*output.logprobs, *(output.prompt_logprobs or ())]
    ranked = [(entry.token_id, entry.rank, [token for token, _ in entry.top]) for entry in entries]
    logprobs = [entry.logprob for entry in entries]
    return logprobs, output.token_ids, output.text, ranked, output.finish_reason, output.stop_reason


def assert_equal(found: Contents, wanted: Contents) -> None:
    assert {key: [rest for _, *rest in contents] for key, contents in found.items()} == {
        key: [rest for _, *rest in contents] for key, contents in wanted.items()
    }
    for key, contents in wanted.items():
        # Chunks of other sizes round differently.
        expected = [logprob for logprobs, *_ in contents for logprob in logprobs]
        assert [logprob for logprobs, *_ in found[key] for logprob in logprobs] == pytest.approx(expected, abs=1e-3)


def test_a_step_is_launched_between_a_copy_and_its_read(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = DeviceStream(monkeypatch)
    engine = tiny_engine(monkeypatch, None, async_scheduling=True)
    stream.attach(engine._runner, monkeypatch)
    outputs_of(engine, [Request("x", [5, 6, 7], SamplingParams(max_tokens=4, temperature=0.0))])
    assert stream.events == [
        "launch 1", "copy 1", "launch 2", "copy 2", "read 1", "launch 3", "copy 3", "read 2", "launch 4", "copy 4",
        "read 3", "read 4",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["greedy", "presence", "repetition", "grammar"])
def test_no_step_is_skipped(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, name: str) -> None:
    """With a grammar, the forward pass is launched before the previous token is read, and sampling after it."""
    stream = DeviceStream(monkeypatch)
    engine = tiny_engine(monkeypatch, tokenizer, async_scheduling=True)
    stream.attach(engine._runner, monkeypatch)
    params = SamplingParams(**({"max_tokens": 6} | KINDS[name]))
    outputs_of(engine, [Request("x", [5, 6, 7], params, structured=_form(name))])
    assert stream.events[-1] == "read 6"
    assert stream.events.index("launch 3") < stream.events.index("read 2")
    assert (stream.events.index("copy 3") > stream.events.index("read 2")) == (name == "grammar")


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 14, "max_num_seqs": 6, "max_num_batched_tokens": 24}])
def test_asynchronous_outputs_equal_synchronous_ones(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, settings: dict[str, int]
) -> None:
    wanted = outputs_of(tiny_engine(monkeypatch, tokenizer, async_scheduling=False), requests())
    assert len(wanted) == len(KINDS) + 2
    DeviceStream(monkeypatch)
    engine = tiny_engine(monkeypatch, tokenizer, async_scheduling=True, **settings)
    assert_equal(outputs_of(engine, requests()), wanted)
    assert (engine.stats().preemptions > 0) == bool(settings)
    engine._runner._batch.check()  # type: ignore[attr-defined]


def test_stops_end_asynchronous_outputs_as_synchronous_ones(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    plain = outputs_of(tiny_engine(monkeypatch, tokenizer), requests())
    seen = [(content[1][0], content[2]) for contents in plain.values() for content in contents[3:6]]
    stops = {"stop_token_ids": tuple({token for token, _ in seen[::4]}), "stop": tuple({t for _, t in seen[1::4] if t})}
    wanted = outputs_of(tiny_engine(monkeypatch, tokenizer), requests(**stops))
    ends = [contents[-1][4:] for contents in wanted.values()]
    assert {type(reason) for end, reason in ends if end == "stop"} >= {int, str}
    DeviceStream(monkeypatch)
    engine = tiny_engine(monkeypatch, tokenizer, async_scheduling=True)
    assert_equal(outputs_of(engine, requests(**stops)), wanted)


def test_an_aborted_request_does_not_affect_the_others(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
    wanted = outputs_of(tiny_engine(monkeypatch, tokenizer), requests())
    DeviceStream(monkeypatch)
    engine = tiny_engine(monkeypatch, tokenizer, async_scheduling=True)
    for name, kind in KINDS.items():
        params = SamplingParams(**{"max_tokens": 30, **kind})
        engine.add_request(Request(f"aborted {name}", [9, 8, 7], params, structured=_form(name)))
    for _ in range(4):
        engine.step()
    for name in KINDS:
        engine.abort(f"aborted {name}")
    assert_equal(outputs_of(engine, requests()), wanted)


def test_a_failure_of_late_sampling_ends_only_the_requests_of_its_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tokenizer: Tokenizer
) -> None:
    engine = tiny_engine(monkeypatch, tokenizer, async_scheduling=True)
    grammar = StructuredSpec("json_schema", SCHEMA)
    engine.add_request(Request("x", [5, 6, 7], SamplingParams(max_tokens=9), structured=grammar))
    engine.step()
    runner: Any = engine._runner
    sample, runner.sample = runner.sample, None
    outputs = engine.step()
    assert [output.error is not None for output in outputs if output.request_id == "x"] == [False, True]
    assert "a step of 1 sequences failed" in caplog.text
    runner.sample = sample
    found = outputs_of(engine, [Request("y", [5, 6, 7], SamplingParams(max_tokens=9, ignore_eos=True))])
    assert len(found["y", 0]) == 9


class _NoWaits(TorchDispatchMode):
    """A mode in which operations fail that would wait for a device: reads of values, and results of unknown size."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "repeat_interleave.Tensor")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        indexes = args[1] if str(func).startswith(("aten.index.", "aten.index_put")) else ()
        by_mask = any(index is not None and index.dtype == torch.bool for index in indexes)
        if by_mask or any(name in str(func) for name in self.WAITS):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


def test_no_operation_around_the_forward_pass_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention and layers are not included: on the CPU they use other code than on a device."""
    monkeypatch.setattr(penalties, "is_host", lambda device: False)
    engine = tiny_engine(monkeypatch, None, async_scheduling=True)
    runner: Any = engine._runner
    monkeypatch.setattr(runner.attention, "prepare", lambda metadata: None)
    monkeypatch.setattr(runner.model, "forward", lambda token_ids, *_: torch.randn(len(token_ids), 32))
    launch: Callable[..., Any] = runner.launch

    def checked(output: Any) -> Any:
        with _NoWaits():
            return launch(output)

    monkeypatch.setattr(runner, "launch", checked)
    wanted = [request for request in requests() if request.structured is None and request.request_id != "top_p"]
    found = outputs_of(engine, wanted)
    assert all(len(contents) == 14 for contents in found.values())


def test_packed_arrays_are_equal_and_aligned() -> None:
    arrays = [
        np.arange(5, dtype=np.int32), np.empty(0, dtype=np.int32), np.arange(6, dtype=np.int32).reshape(2, 3),
        np.array([0.5, -1.0]), np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2], np.array([7], dtype=np.uint8),
    ]  # fmt: skip
    buffer = torch.empty(packed_size(arrays), dtype=torch.uint8)
    pack(arrays, buffer)
    for array, view in zip(arrays, unpack(buffer, arrays), strict=True):
        assert view.numpy().dtype == array.dtype
        assert np.array_equal(view.numpy(), array)
        assert view.storage_offset() * view.itemsize % 16 == 0
