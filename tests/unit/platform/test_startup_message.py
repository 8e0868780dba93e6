"""The start message: on a machine with a GPU it names managed engines first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inference_worker.contract.command_line import PROGRAM, format_command
from inference_worker.contract.compute_support import SlowReason
from inference_worker.contract.env import load
from millrace.cli.startup_message import greeting
from millrace.environment import configuration
from millrace.local.gpus import find_gpus
from tests.support.code_blocks import ROOT
from tests.support.printed_commands import check_command

CREDENTIALS = {"operator_email": "operator@example.com", "owner_email": "owner@example.com", "demo_key": "sk-mr-1"}


def message(directory: Path, gpus: list[str]) -> str:
    settings = load(configuration.PlatformSettings, {**os.environ, "MILLRACE_DATA_DIR": str(directory)})
    return greeting(settings, CREDENTIALS, directory, show_secrets=False, gpus=gpus)


def test_models_with_a_slow_backend_are_named_with_an_instruction(tmp_path: Path) -> None:
    settings = load(configuration.PlatformSettings, {**os.environ, "MILLRACE_DATA_DIR": str(tmp_path)})
    slow = {"llama": SlowReason.BLOCK_SIZE}
    text = greeting(settings, CREDENTIALS, tmp_path, show_secrets=False, slow=slow)
    assert f"llama is slow: {SlowReason.BLOCK_SIZE.cause}.\n{SlowReason.BLOCK_SIZE.instruction}\n" in text
    assert "is slow" not in message(tmp_path, [])


def add_gpu(root: Path, address: str, text: str) -> None:
    directory = root / "proc/driver/nvidia/gpus" / address
    directory.mkdir(parents=True)
    (directory / "information").write_text(text)


def test_gpus_are_named_by_their_driver(tmp_path: Path) -> None:
    assert find_gpus(tmp_path) == []
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm", "kfd"):
        (tmp_path / "dev" / name).touch()
    assert find_gpus(tmp_path) == ["NVIDIA GPU", "AMD GPU"]
    add_gpu(tmp_path, "0000:01:00.0", "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 16\n")
    add_gpu(tmp_path, "0000:02:00.0", "")
    assert find_gpus(tmp_path) == ["NVIDIA H100 80GB HBM3", "NVIDIA GPU", "AMD GPU"]


def test_without_a_gpu_the_message_does_not_name_one(tmp_path: Path) -> None:
    text = message(tmp_path, [])
    assert "GPU" not in text
    assert "managed" not in text
    assert f"commands    {format_command()} --help" in text


@pytest.mark.parametrize(
    ("gpus", "names"),
    [
        (["NVIDIA L4"], "This machine has NVIDIA L4."),
        (["NVIDIA H100"] * 2 + ["AMD GPU"], "This machine has 2 × NVIDIA H100, AMD GPU."),
    ],
)
def test_with_a_gpu_managed_engines_come_before_the_first_request(tmp_path: Path, gpus: list[str], names: str) -> None:
    text = message(tmp_path, gpus)
    assert names in text
    assert "has not run on a GPU yet" in text
    assert text.index("managed engines") < text.index("Try it with curl")
    program = format_command()
    commands = [line for line in text.replace("\\\n", "").splitlines() if line.startswith(f"{program} ")]
    assert len(commands) == 2
    for command in commands:
        assert check_command(command.replace(program, PROGRAM, 1)) is None
    server = "VLLM_API_KEY={api_key} vllm serve {model} --host {host} --port {port} --max-model-len {context_length}"
    assert f"--command '{server}'" in commands[1]


def test_the_readme_names_managed_engines_before_the_start() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.index("**On a machine with a GPU**") < text.index("make up")
