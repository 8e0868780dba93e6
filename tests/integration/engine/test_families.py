"""Each model family compared with transformers, on small models with random weights."""

from __future__ import annotations

import json
import os
import random
import sys

import pytest
import torch
from click.testing import CliRunner

from inference_worker import offline
from millrace import cli
from tests.support.engine.families import CASES, VOCAB, WINDOW, FamilyModel, Generated, generate

NEW = 10
_RANDOM = random.Random(0)
# Of several blocks and chunks. The window of 20 tokens ends in the second and third prompt.
PROMPTS = {
    name: [_RANDOM.randrange(3, VOCAB) for _ in range(count)] for name, count in (("a", 20), ("b", 27), ("c", 42))
}


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FamilyModel:
    return FamilyModel(CASES[request.param], tmp_path_factory.mktemp(request.param))


def assert_equals_transformers(model: FamilyModel, got: Generated) -> None:
    """Check the logits' relative error, and that each token is the best one by more than the error."""
    assert len(got.tokens) == NEW
    wanted = model.logits(got.prompt + got.tokens)
    scale = float(wanted.abs().max())
    for index, token in enumerate(got.tokens):
        position = len(got.prompt) + index
        want = wanted[position - 1]
        error = float((got.logits[position] - want).abs().max())
        assert error < 1e-4 * scale, f"position {position}: relative error {error / scale}"
        best, second = want.topk(2).values.tolist()
        assert best - second > 2 * error, "a tie: choose another seed"
        assert token == int(want.argmax())


def test_logits_and_tokens_equal_transformers(model: FamilyModel) -> None:
    engine = model.engine()
    together = generate(engine, PROMPTS, NEW, urgent=["a", "b"])
    assert engine.stats().preemptions > 0
    for got in together.values():
        assert_equals_transformers(model, got)
    repeated = generate(engine, {"c": PROMPTS["c"]}, NEW)["c"]
    again = generate(engine, {"c": PROMPTS["c"]}, NEW)["c"]
    assert again.cached_tokens > WINDOW
    for got in (repeated, again):
        assert_equals_transformers(model, got)


def test_the_batch_invariant_mode_is_bit_identical(model: FamilyModel) -> None:
    engine = model.engine(batch_invariant=True, num_blocks=30, prefix_cache=False)
    together = generate(engine, PROMPTS, NEW)
    alone = generate(engine, {"c": PROMPTS["c"]}, NEW)["c"]
    assert_equals_transformers(model, alone)
    assert alone.tokens == together["c"].tokens
    assert all(torch.equal(row, together["c"].logits[at]) for at, row in alone.logits.items())


def test_bfloat16_is_close_to_transformers(model: FamilyModel) -> None:
    engine = model.engine(dtype="bfloat16", num_blocks=30)
    for got in generate(engine, PROMPTS, 1).values():
        want = model.logits(got.prompt)[-1]
        error = (got.logits[len(got.prompt)].float() - want).norm() / want.norm()
        assert error < 0.06


def test_the_command_generates_from_token_ids(model: FamilyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory has no tokenizer. The command runs in this process instead of replacing it."""

    def execute(_: str, arguments: list[str]) -> None:
        monkeypatch.setattr(sys, "argv", arguments[2:])
        sys.exit(offline.main())

    monkeypatch.setattr(os, "execv", execute)
    options = ["--prompt-ids", "1,2,3", "--max-tokens", "16", "--dtype", "float32", "--json"]
    outcome = CliRunner().invoke(cli.root, ["generate", str(model.directory), *options])
    assert outcome.exit_code == 0, outcome.output
    result = json.loads(outcome.stdout)
    assert (result["prompt_ids"], len(result["token_ids"]), result["finish_reason"]) == ([1, 2, 3], 16, "length")
    logprobs = model.logits([1, 2, 3] + result["token_ids"])[2:-1].log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(result["token_ids"])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(result["logprobs"]), chosen, atol=1e-4, rtol=0)
    torch.testing.assert_close(logprobs.amax(-1), chosen, atol=1e-4, rtol=0)


@pytest.mark.parametrize("model", ["mistral", "phi3"], indirect=True)
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_sequence_longer_than_the_cache_equals_transformers(model: FamilyModel, async_scheduling: bool) -> None:
    engine = model.engine(num_blocks=8, async_scheduling=async_scheduling)  # 64 tokens; all layers have a window
    prompt = [_RANDOM.randrange(3, VOCAB) for _ in range(140)]
    assert_equals_transformers(model, generate(engine, {"long": prompt}, NEW)["long"])
    engine.check_integrity()
