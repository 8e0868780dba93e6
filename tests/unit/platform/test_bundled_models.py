"""The bundled models on small and large machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inference_worker.contract.env import load
from inference_worker.contract.settings import parse_models
from millrace.environment import configuration
from millrace.local import bundled_models, stack
from millrace.local.bundled_models import MachineSize, choose_models, read_machine_size

GIB = 1 << 30
MODELS = parse_models("a=embedded,a-int8=embedded?quantization=int8,b=embedded:minilm")


@pytest.mark.parametrize("machine", [MachineSize(3, 64 * GIB), MachineSize(64, 11 * GIB)])
def test_a_small_machine_serves_no_quantized_copy(machine: MachineSize) -> None:
    models, reason = choose_models(MODELS, machine)
    assert [spec.name for spec in models] == ["a", "b"]
    assert f"a-int8 is not served: this machine has {machine.cores} cores and {machine.memory // GIB}.0 GiB" in reason
    assert choose_models(models, machine) == (models, "")


def test_a_large_machine_serves_all() -> None:
    assert choose_models(MODELS, MachineSize(4, 12 * GIB)) == (MODELS, "")


def test_memory_is_bounded_by_the_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total = read_machine_size().memory
    assert total > 2**20
    monkeypatch.setattr(bundled_models, "_LIMIT", tmp_path / "memory.max")
    for text, memory in (("max\n", total), (f"{2**20}\n", 2**20)):
        (tmp_path / "memory.max").write_text(text)
        assert read_machine_size().memory == memory


@pytest.mark.parametrize("given", [True, False])
def test_only_the_default_models_depend_on_the_machine(
    given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "read_machine_size", lambda: MachineSize(1, GIB))
    environ = {name: value for name, value in os.environ.items() if name != "MILLRACE_MODELS"}
    environ["MILLRACE_DATA_DIR"] = str(tmp_path)
    if given:
        environ["MILLRACE_MODELS"] = "a=embedded,a-int8=embedded?quantization=int8"
    found = stack.Stack(environ)
    served = load(configuration.PlatformSettings, found.environ()).models
    assert served == found.settings.models
    assert [spec.quantization for spec in served] == (["none", "int8"] if given else ["none", "none"])


@pytest.mark.parametrize(("limit", "cores"), [("150000 100000", 1), ("50000 100000", 1), ("max 100000", None)])
def test_cores_are_bounded_by_the_control_groups_quota(limit: str, cores: int | None, tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    (tmp_path / "proc/self").mkdir(parents=True)
    group.mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (group / "cpu.max").write_text(f"{limit}\n")
    assert read_machine_size(tmp_path).cores == (cores or len(os.sched_getaffinity(0)))
