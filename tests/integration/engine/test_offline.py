"""`millrace generate` and `bench`: the engine without services."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from inference_worker.checkpoints.model_config import ModelError
from inference_worker.offline import OfflineModel, OfflineOptions, generate, measure
from millrace import cli

ROOT = Path(__file__).resolve().parents[3]


def command(*line: str) -> Any:
    return subprocess.run(
        [sys.executable, "-m", "millrace.cli", *line], capture_output=True, text=True, check=False, cwd=ROOT
    )


def test_generate_prints_the_tokens_of_a_greedy_completion(model_dir, tokenizer):
    line = ["generate", str(model_dir), "--prompt", "The sky is", "--max-tokens", "4", "--dtype", "float32", "--json"]
    said = command(*line)
    assert said.returncode == 0, said.stderr
    result = json.loads(said.stdout)
    assert result["prompt_ids"] == tokenizer.encode("The sky is")
    assert len(result["token_ids"]) == 4
    assert result["text"] == tokenizer.decode(result["token_ids"])
    assert result["finish_reason"] == "length"
    assert len(result["logprobs"]) == 4
    assert all(logprob < 0 for logprob in result["logprobs"])

    same = generate(
        OfflineOptions(str(model_dir), prompt_ids=tuple(result["prompt_ids"]), max_tokens=4, dtype="float32")
    )
    assert same["token_ids"] == result["token_ids"]


def test_bench_measures_each_number_of_streams(model_dir):
    rows = measure(OfflineOptions(str(model_dir), prompt_tokens=4, max_tokens=2, streams=(1, 3)))
    assert [(row["streams"], row["output_tokens"]) for row in rows] == [(1, 2), (3, 6)]
    assert all(row["tokens_per_second"] > 0 for row in rows)


def test_error_names_the_problem(tmp_path):
    with pytest.raises(ModelError, match="no such file"):
        generate(OfflineOptions(str(tmp_path)))
    said = command("generate", str(tmp_path / "missing"), "--prompt", "x")
    assert (said.returncode, said.stdout) == (1, "")
    assert said.stderr.startswith("millrace generate: ")


def test_the_settings_of_the_worker_choose_the_kernels_and_threads(model_dir, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setenv("MILLRACE_CPU_KERNELS", "generic")
    monkeypatch.setenv("MILLRACE_CPU_THREADS", "1")
    before = torch.get_num_threads()
    options = OfflineOptions(str(model_dir), prompt="x")
    OfflineModel.find(options).load(options, 1, 64)
    torch.set_num_threads(before)
    assert any(record.message.startswith("CPU: generic · 1 threads of ") for record in caplog.records)
    monkeypatch.setenv("MILLRACE_CPU_KERNELS", "mmx")
    said = command("generate", str(model_dir), "--prompt", "x")
    assert (said.returncode, said.stdout) == (1, "")
    assert "MILLRACE_CPU_KERNELS: 'mmx' is not valid: want one of auto, pytorch, " in said.stderr


@pytest.mark.parametrize(
    "line",
    [
        ["generate", "m"],
        ["generate", "m", "--prompt", "a", "--prompt-ids", "1"],
        ["generate", "m", "--prompt-ids", "a"],
        ["bench", "m", "--streams", "0"],
    ],
)
def test_wrong_usage(line):
    assert CliRunner().invoke(cli.root, line).exit_code == 2
