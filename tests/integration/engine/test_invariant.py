"""The batch-invariant mode: a request's tokens and logits are bit-identical, whatever else is in the batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from inference_worker.contract.engine_config import DTypeName, EngineConfig
from inference_worker.contract.request import Request, RequestOutput, SamplingParams, ServiceClass, TokenLogprobs
from inference_worker.engine.architectures.layers import InvariantLinear, Layers, Linear
from inference_worker.engine.attention.base import (
    AttentionBackend,
    AttentionSpec,
    CacheShape,
    ReferenceBackend,
    StepMetadata,
)
from inference_worker.engine.attention.batch_invariant import InvariantBackend
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.sampling import sampler
from inference_worker.engine.sampling.penalties import Penalties
from inference_worker.engine.sampling.sampler import Sampled, Sampler
from inference_worker.engine.sequences.sequence import Sequence as EngineSequence
from kernels import invariant
from kernels.native.library import Library
from tests.support.engine.fakes import run
from tests.support.engine.golden import Golden, first_difference, read_golden

# Takes seconds on an idle machine, and many times longer on shared cores.
pytestmark = pytest.mark.timeout(600)

NEW = 12
DTYPES = [torch.float32, torch.bfloat16]
few = settings(max_examples=50, deadline=None)


# The whole engine


@dataclass
class Trace:
    """The result of one request."""

    tokens: list[int] = field(default_factory=list)
    logits: dict[int, torch.Tensor] = field(default_factory=dict)  # by position of the token sampled from them
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True)
class Alone:
    """The outputs of the probes, each run separately in an idle engine."""

    llm: LLMEngine
    dtype: DTypeName
    traces: dict[str, Trace]


@pytest.fixture(scope="module")
def golden() -> list[Golden]:
    return sorted(read_golden(), key=lambda entry: len(entry.prompt_token_ids))


@pytest.fixture(scope="module")
def probes(golden: list[Golden]) -> list[Request]:
    """Greedy and sampled requests. Contexts are within a split of 128 keys, or across its end by decode or prompt."""
    greedy = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    drawn = greedy.replace(temperature=0.9, top_p=0.9, seed=7, logprobs=2)
    params = {0: greedy.replace(prompt_logprobs=1), 120: drawn, 177: greedy, 189: greedy}
    return [Request(golden[i].id, golden[i].prompt_token_ids, p) for i, p in params.items()]


@pytest.fixture(scope="module")
def company(golden: list[Golden]) -> list[Request]:
    """28 other requests. Some end early, so that the batch changes between steps."""
    return [
        Request(golden[i].id, golden[i].prompt_token_ids, SamplingParams(max_tokens=4 + i, temperature=0))
        for i in range(1, 29)
    ]


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    """One thread by default, since several threads on shared cores wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=[pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def alone(request: pytest.FixtureRequest, probes: list[Request], model_dir: Path) -> Alone:
    llm = engine(model_dir, request.param)
    traces: dict[str, Trace] = {}
    for probe in probes:
        traces |= serve(llm, [probe], [replace(probe, cache_salt=probe.request_id.encode())])
    assert not any(trace.cached_tokens for trace in traces.values())
    return Alone(llm, request.param, traces)


def engine(model_dir: Path, dtype: DTypeName, **changes: int) -> LLMEngine:
    given = {"max_num_seqs": 32, "block_size": 16, "num_blocks": 600, "measure_peaks": False, **changes}
    return LLMEngine(EngineConfig(model_dir, device="cpu", dtype=dtype, batch_invariant=True, **given))  # type: ignore[arg-type]


def serve(llm: LLMEngine, probes: Iterable[Request], *waves: Iterable[Request]) -> dict[str, Trace]:
    """Run waves of requests, each NEW steps after the previous one; return the results of the probes."""
    traces = {probe.request_id: Trace() for probe in probes}
    sample = Sampler.sample

    def record(
        self: Sampler,
        logits: torch.Tensor,
        seqs: Sequence[EngineSequence],
        positions: Sequence[int],
        drafts: Sequence[Sequence[int]] = (),
    ) -> Sampled:
        for row, seq, position in zip(logits, seqs, positions, strict=True):
            if seq.request_id in traces:
                traces[seq.request_id].logits[position] = row.clone()
                traces[seq.request_id].preemptions = seq.preemptions
        return sample(self, logits, seqs, positions, drafts)

    outputs: list[RequestOutput] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "sample", record)
        for wave in waves:
            for request in wave:
                llm.add_request(request)
            outputs += chain.from_iterable(run(llm, NEW).values())
        outputs += chain.from_iterable(run(llm).values())
    for output in outputs:
        assert output.error is None
        if trace := traces.get(output.request_id):
            trace.tokens += output.token_ids
            trace.logprobs += (output.prompt_logprobs or []) + output.logprobs
            trace.cached_tokens = output.cached_tokens
    return traces


def assert_same(got: dict[str, Trace], wanted: dict[str, Trace]) -> None:
    for name, want in wanted.items():
        assert len(want.tokens) == NEW
        assert got[name].tokens == want.tokens, name
        assert got[name].logprobs == want.logprobs, name
        assert got[name].logits.keys() == want.logits.keys()
        unlike = [at for at, row in want.logits.items() if not torch.equal(row, got[name].logits[at])]
        assert not unlike, f"{name}: the logits of positions {unlike}"


def test_single_requests_equal_transformers(alone: Alone, golden: list[Golden], probes: list[Request]) -> None:
    if alone.dtype == "float32":  # bfloat16 has near ties of its own
        greedy = {probe.request_id for probe in probes if probe.params.temperature == 0}
        for entry in (g for g in golden if g.id in greedy):
            shorter = replace(entry, tokens=entry.tokens[:NEW])
            assert first_difference(shorter, alone.traces[entry.id].tokens) is None
    assert len({tuple(trace.tokens) for trace in alone.traces.values()}) == len(probes)
    assert all(trace.logits for trace in alone.traces.values())


def test_outputs_are_equal_among_31_other_requests(
    alone: Alone, probes: list[Request], company: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose, drawn_at_once = sampler._choose, set[int]()

    def count(
        logits: torch.Tensor,
        rows: Sequence[sampler.SampleRow],
        penalties: Penalties | None,
        kernels: Library | None,
    ) -> torch.Tensor:
        drawn_at_once.add(len(rows))
        return choose(logits, rows, penalties, kernels)

    monkeypatch.setattr(sampler, "_choose", count)
    before = alone.llm.stats()
    assert_same(serve(alone.llm, probes, [*company, *probes]), alone.traces)
    stats = alone.llm.stats()
    assert stats.batched_sequences - before.batched_sequences > 10 * (stats.steps - before.steps)
    assert drawn_at_once == {1}


def test_chunks_preemption_and_cache_hits_do_not_change_them(
    alone: Alone, probes: list[Request], company: list[Request], model_dir: Path
) -> None:
    # No chunk is a whole tile or block. The probes fill the pool when requests with precedence arrive.
    llm = engine(model_dir, alone.dtype, max_num_batched_tokens=45, long_prefill_token_threshold=13, num_blocks=34)
    humble = [replace(probe, service_class=ServiceClass.FLEX) for probe in probes]
    urgent = [replace(request, service_class=ServiceClass.PRIORITY) for request in company[4:10]]
    crowded = serve(llm, probes, [*company[:2], *humble], urgent)
    assert_same(crowded, alone.traces)
    assert any(trace.preemptions for trace in crowded.values())
    again = serve(llm, probes, reversed(probes))
    assert_same(again, alone.traces)
    cached = {name: trace.cached_tokens for name, trace in again.items()}
    assert sum(tokens > 32 for tokens in cached.values()) >= 2, cached


# Its parts


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def assert_near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-5 if got.dtype == torch.float32 else 0.02)


def assert_rows_alone(function: Callable[..., torch.Tensor], *rows: torch.Tensor) -> None:
    """Check that `function` gives equal results for rows separately, in any order, and among the others."""
    count = len(rows[0])
    chosen = torch.randperm(count)[: random.randint(1, count)]
    assert torch.equal(function(*rows)[chosen], function(*(x[chosen] for x in rows)))


@few
@given(
    st.integers(1, 300), st.integers(16, 200), st.integers(2, 70), st.sampled_from(DTYPES), st.booleans(), st.booleans()
)
def test_a_row_of_a_product_does_not_depend_on_the_others(
    inputs: int, outputs: int, rows: int, dtype: torch.dtype, packed: bool, biased: bool
) -> None:
    # With fewer outputs, and unpacked, some machines' products depend on a row's position: such layers are rejected.
    weight, bias = randn(outputs, inputs, dtype=dtype), randn(outputs, dtype=dtype) if biased else None
    linear, plain = InvariantLinear(weight, bias, pack=packed), Linear(weight, bias, pack=packed)
    x, other = randn(rows, inputs, dtype=dtype), randn(rows, outputs, dtype=dtype)
    assert_near(linear(x), plain(x))
    assert_near(linear.add(x, other), plain.add(x, other))
    assert_rows_alone(linear, x)
    assert_rows_alone(linear.add, x, other)


@few
@given(st.integers(1, 3000), st.integers(2, 70), st.sampled_from(DTYPES), st.sampled_from([1, 3]))
def test_a_row_normalized_or_gated_does_not_depend_on_the_others(
    width: int, rows: int, dtype: torch.dtype, threads: int
) -> None:
    weight, x, pairs = (randn(*shape, dtype=dtype) for shape in ((width,), (rows, width), (rows, 2 * width)))
    ours, theirs = Layers(batch_invariant=True), Layers()
    with on_threads(threads):
        assert_near(ours.norm(weight, 1e-5)(x), theirs.norm(weight, 1e-5)(x))
        assert_near(ours.silu_mul(pairs), theirs.silu_mul(pairs))
        assert_rows_alone(ours.norm(weight, 1e-5), x)
        assert_rows_alone(ours.silu_mul, pairs)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("function", [torch.exp_, torch.sigmoid_])
def test_an_element_does_not_depend_on_its_position(
    function: Callable[[torch.Tensor], torch.Tensor], threads: int
) -> None:
    # Enough that a scalar loop at the end of a row or of a thread's share would round some differently.
    x = randn(200_000)
    with on_threads(threads):
        whole = invariant.apply_elementwise(function, x)
        assert_near(whole, function(x.clone()))
        for start in (1, 7, 33, 100, 65_551):
            assert torch.equal(whole[start:], invariant.apply_elementwise(function, x[start:]))
        for start in range(0, len(x), 250):
            assert torch.equal(
                whole[start : start + 250], invariant.apply_elementwise(function, x[start : start + 250])
            )


@given(st.integers(1, 300))
@few
def test_a_tree_of_additions(width: int) -> None:
    x = torch.randint(-1000, 1000, (3, width)).float()
    assert torch.equal(invariant.add_up(x), x.sum(-1, keepdim=True))


def test_a_machine_on_which_the_position_matters_is_rejected() -> None:
    places = torch.arange(invariant.TILE_ROWS)[:, None] / 1e6
    with pytest.raises(RuntimeError, match="not batch-invariant"):
        invariant.require_equal_rows(lambda x: x + places, randn(8))
    invariant.require_equal_rows(lambda x: x + 1, randn(8))


def test_another_attention_backend_is_rejected() -> None:
    with pytest.raises(ValueError, match="not batch-invariant"):
        EngineConfig(Path(), batch_invariant=True, attention="cpu")


PLAIN = AttentionSpec(0.3)


class Pages:
    """Sequences in random pages of a backend, computed in any steps, with the results by sequence."""

    def __init__(
        self,
        shape: CacheShape,
        heads: int,
        inputs: Sequence[torch.Tensor],
        backend: type[AttentionBackend] = InvariantBackend,
        spec: AttentionSpec = PLAIN,
    ) -> None:
        self.backend = backend(shape, heads, [spec])
        self.heads = (heads, shape.num_kv_heads, shape.num_kv_heads)
        self.shape = shape
        self.inputs = inputs
        free = random.sample(range(1, shape.num_blocks), shape.num_blocks - 1)
        self.tables = [[free.pop() for _ in range(-(-len(x) // shape.block_size))] for x in inputs]
        self.done = [0] * len(inputs)
        self.results: list[list[torch.Tensor]] = [[] for _ in inputs]

    def step(self, news: dict[int, int]) -> None:
        """Compute the next news[i] tokens of each sequence i."""
        spans = {i: range(self.done[i], self.done[i] + count) for i, count in news.items()}
        lens = torch.tensor([len(span) for span in spans.values()])
        positions = torch.tensor([p for span in spans.values() for p in span])
        size = self.shape.block_size
        widest = max(len(self.tables[i]) for i in spans)
        metadata = StepMetadata(
            num_seqs=len(spans),
            num_tokens=len(positions),
            num_decodes=0,
            query_lens=lens.tolist(),
            lengths=[span.stop for span in spans.values()],
            query_start_loc=functional.pad(lens.cumsum(0), (1, 0)),
            seq_lens=torch.tensor([span.stop for span in spans.values()]),
            block_table=torch.tensor([self.tables[i] + [0] * (widest - len(self.tables[i])) for i in spans]),
            slot_mapping=torch.tensor([self.tables[i][p // size] * size + p % size for i in spans for p in spans[i]]),
            positions=positions,
        )
        self.backend.prepare(metadata)
        qkv = torch.cat([self.inputs[i][span.start : span.stop] for i, span in spans.items()])
        parts = qkv.view(len(qkv), -1, self.shape.head_dim).split(self.heads, dim=1)
        for i, part in zip(spans, self.backend.attend(0, *parts, metadata).split(lens.tolist()), strict=True):
            self.results[i].append(part)
            self.done[i] = spans[i].stop

    def result(self, index: int) -> torch.Tensor:
        return torch.cat(self.results[index])


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([8, 20, 64]),
    st.sampled_from([1, 16, 17, 32]),
    st.sampled_from(DTYPES),
    st.sampled_from([PLAIN, AttentionSpec(0.3, soft_cap=2.0), AttentionSpec(0.3, window=37, soft_cap=9.0)]),
    st.lists(st.integers(1, 300), min_size=2, max_size=12),
)
def test_attention_does_not_depend_on_chunks_or_neighbors(
    kv_heads: int,
    share: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    spec: AttentionSpec,
    lengths: list[int],
) -> None:
    blocks = sum(-(-length // block_size) for length in lengths) + 1
    shape = CacheShape(1, blocks, block_size, kv_heads, head_dim, dtype, torch.device("cpu"))
    heads = kv_heads * share
    inputs = [randn(length, (heads + 2 * kv_heads) * head_dim, dtype=dtype) for length in lengths]
    together = Pages(shape, heads, inputs, spec=spec)
    while left := [i for i, length in enumerate(lengths) if together.done[i] < length]:
        some = random.sample(left, random.randint(1, len(left)))
        together.step({i: random.randint(1, min(90, lengths[i] - together.done[i])) for i in some})
    for i, length in enumerate(lengths[:3]):
        whole, decoded, oracle = (
            Pages(shape, heads, inputs[i : i + 1], cls, spec)
            for cls in (InvariantBackend, InvariantBackend, ReferenceBackend)
        )
        for pages, prompt in ((whole, length), (decoded, max(1, length - 20)), (oracle, length)):
            pages.step({0: prompt})
            for _ in range(prompt, length):
                pages.step({0: 1})
        assert_near(whole.result(0), oracle.result(0))
        assert torch.equal(whole.result(0), decoded.result(0))
        assert torch.equal(whole.result(0), together.result(i))


def test_non_finite_values_in_a_reused_page_have_no_effect() -> None:
    shape = CacheShape(1, 3, 16, 1, 8, torch.float32, torch.device("cpu"))
    broken = torch.full((20, 3 * 8), float("nan"))
    broken[::2] = float("inf")
    first = Pages(shape, 1, [broken])
    first.step({0: 20})
    x = randn(18, 3 * 8)
    clean, used = Pages(shape, 1, [x]), Pages(shape, 1, [x])
    used.backend = first.backend
    for pages in (clean, used):
        pages.step({0: 18})
    assert clean.result(0).isfinite().all()
    assert torch.equal(clean.result(0), used.result(0))
