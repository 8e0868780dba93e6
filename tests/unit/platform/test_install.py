"""The installer that `make setup` uses, and the build of PyTorch that it chooses for a machine."""

from __future__ import annotations

import sys
import urllib.request
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from packaging.requirements import Requirement

from tools import install
from tools.install import CPU_INDEX, InstallationFailed, Installer

UV = install.make_uv_installer("uv")
PIP = install.make_pip_installer([sys.executable, "-m", "pip"])
ROCM_INDEX = "https://download.pytorch.org/whl/rocm7.2"
PINS = ["torch==2.13.0", "triton==3.7.1"]
CONSTRAINTS = Path("constraints.txt")


def arguments(
    installer: Installer,
    *,
    installed: str | None = None,
    system: str = "Linux",
    gpu: str | None = None,
    setting: str = "",
    offered: str | None = "2.13.0",
    cpu_index_answers: bool = True,
) -> tuple[str, list[list[str]]]:
    """Return the reason of the choice, and the arguments of each command after those that all commands have."""

    def answers(url: str) -> bool:
        assert url == CPU_INDEX
        return cpu_index_answers

    build = install.choose_torch(installed, system, gpu, setting, lambda: offered, answers)
    commands = list(install.torch_commands(build, installer, PINS, CONSTRAINTS))
    common = list(installer.command)
    assert all(command[: len(common)] == common for command in commands)
    return build.reason, [command[len(common) :] for command in commands]


DEFAULT = [[*PINS, "--constraint", "constraints.txt"]]


@pytest.fixture(autouse=True)
def torch_requirements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requirements of the installed build of PyTorch. The CPU build has no triton."""
    requirements = ["filelock", "sympy>=1.13.3"]
    monkeypatch.setattr(metadata, "requires", lambda _: requirements)
    return requirements


def test_uv_does_not_read_the_settings_that_exclude_pytorch_from_the_lock() -> None:
    assert UV.command[3:5] == ("--project", "/")


@pytest.mark.parametrize("installer", [UV, PIP])
def test_a_machine_with_an_nvidia_gpu_gets_the_default_build(installer: Installer) -> None:
    reason, commands = arguments(installer, gpu="NVIDIA")
    assert commands == DEFAULT
    assert "has an NVIDIA GPU" in reason


@pytest.mark.parametrize(("installer", "option"), [(UV, "--default-index"), (PIP, "--index-url")])
def test_a_machine_without_a_gpu_gets_the_cpu_build_and_nothing_else_of_its_index(
    installer: Installer, option: str
) -> None:
    reason, commands = arguments(installer)
    assert commands == [["--no-deps", option, CPU_INDEX, "torch==2.13.0"], *DEFAULT]
    assert f"the CPU build of {CPU_INDEX}, because this machine has no NVIDIA GPU" in reason


def test_a_machine_with_an_amd_gpu_gets_the_cpu_build_and_advice() -> None:
    reason, commands = arguments(UV, gpu="AMD")
    assert commands == arguments(UV)[1]
    assert "For its AMD GPU, set TORCH_INDEX" in reason


def test_a_cpu_build_of_the_configured_index_is_preferred() -> None:
    reason, commands = arguments(UV, offered="2.13.0+cpu", cpu_index_answers=False)
    assert commands == DEFAULT
    assert "the CPU build of the configured package index" in reason


@pytest.mark.parametrize("offered", ["2.13.0", None])
def test_the_size_is_printed_before_a_build_with_cuda_is_taken_without_a_gpu(offered: str | None) -> None:
    reason, commands = arguments(UV, offered=offered, cpu_index_answers=False)
    assert commands == DEFAULT
    assert "2.8 GB" in reason
    assert f"{CPU_INDEX} cannot be reached" in reason
    assert "set TORCH_INDEX" in reason


def test_macos_gets_the_default_build() -> None:
    reason, commands = arguments(UV, system="Darwin", cpu_index_answers=False)
    assert commands == DEFAULT
    assert "no CUDA on Darwin" in reason


def test_an_installed_build_is_kept() -> None:
    reason, commands = arguments(UV, installed="2.13.0+cpu", setting=ROCM_INDEX, cpu_index_answers=False)
    assert commands == DEFAULT
    assert reason.startswith("2.13.0+cpu is installed.")


@pytest.mark.parametrize(
    ("pin", "version"), [("torch==2.13.0", "2.13.0+cpu"), ("torch==2.13.1", None), ("none==1", None)]
)
def test_installed_versions(monkeypatch: pytest.MonkeyPatch, pin: str, version: str | None) -> None:
    def find(name: str) -> str:
        if name == "torch":
            return "2.13.0+cpu"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", find)
    assert install.installed_version(pin) == version


def test_credentials_of_an_index_are_not_printed() -> None:
    reason, commands = arguments(UV, setting="https://user:secret@packages.example.com/torch")
    assert "TORCH_INDEX=https://packages.example.com/torch" in reason
    assert "https://user:secret@packages.example.com/torch" in commands[0]


@pytest.mark.parametrize("gpu", [None, "AMD", "NVIDIA"])
def test_a_setting_replaces_the_choice(gpu: str | None) -> None:
    index = "https://packages.example.com/torch/cpu"
    reason, commands = arguments(PIP, gpu=gpu, setting=index, cpu_index_answers=False)
    assert commands == [
        ["--no-deps", "--index-url", index, "torch==2.13.0"],
        [*DEFAULT[0], "--extra-index-url", index],
    ]
    assert f"TORCH_INDEX={index}" in reason


@pytest.mark.parametrize("triton", ["triton-rocm==3.7.1", "pytorch-triton-rocm==3.7.1", "triton==3.7.0"])
def test_a_build_with_its_own_triton_keeps_it(torch_requirements: list[str], triton: str) -> None:
    torch_requirements.append(triton)
    _, commands = arguments(UV, gpu="AMD", setting=ROCM_INDEX)
    assert commands[1] == ["torch==2.13.0", "--constraint", "constraints.txt", "--index", ROCM_INDEX]


@pytest.mark.parametrize(
    ("path", "gpu"),
    [
        ("proc/driver/nvidia/version", "NVIDIA"),
        ("dev/nvidiactl", "NVIDIA"),
        ("usr/lib/wsl/lib/libcuda.so.1", "NVIDIA"),
        ("dev/kfd", "AMD"),
        ("dev/null", None),
    ],
)
def test_gpus_are_detected(tmp_path: Path, path: str, gpu: str | None) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).touch()
    assert install.detect_gpu(tmp_path) == gpu


def test_an_index_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = Event()

    def wait(*_: Any, **__: Any) -> None:
        stopped.wait(60)
        raise OSError

    monkeypatch.setattr(install, "PROBE_SECONDS", 0.05)
    monkeypatch.setattr(urllib.request, "urlopen", wait)
    assert not install.index_answers(CPU_INDEX)
    stopped.set()


def test_an_index_that_refuses_connections_does_not_answer() -> None:
    assert not install.index_answers("http://127.0.0.1:9")


def test_what_torch_depends_on_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    requirements = [Requirement(text) for text in metadata.requires("torch") or ()]
    needed = {each.name for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})}
    lock = (install.ROOT / "requirements.lock").read_text(encoding="utf-8")
    locked = {text.partition("==")[0] for text in install.read_versions(install.read_section(lock, "server"))}
    with_gpu = {name for name in needed if name.startswith(("cuda-", "nvidia-", "triton"))}
    assert needed - with_gpu <= locked


LOCK = """# Exported.

## dev docs
a==1 \\
    --hash=sha256:1

## docs server
b==2 ; python_version < '3.12' \\
    --hash=sha256:2 \\
    --hash=sha256:3

## server
c==3 \\
    --hash=sha256:4
"""


def test_a_section_is_installed_by_the_groups_of_its_title() -> None:
    assert install.read_versions(install.read_section(LOCK, "server")) == ["b==2 ; python_version < '3.12'", "c==3"]
    assert install.read_versions(install.read_section(LOCK, "docs")) == ["a==1", "b==2 ; python_version < '3.12'"]
    assert install.read_section(LOCK, "dev") == "a==1 \\\n    --hash=sha256:1\n\n"


PIP_CONFIG = r""":env:.find-links='/wheels'
:env:.timeout='180'
global.extra-index-url='\nhttps://one.example.com/simple\nhttps://two.example.com/simple'
global.find-links='/unused'
global.index-url='https://mirror.example.com/simple'
install.no-index='false'
list.index-url='https://other.example.com/simple'
"""


def test_uv_uses_the_indexes_of_pips_configuration() -> None:
    assert install.uv_environment(PIP_CONFIG, {"UV_NO_INDEX": "1"}) == {
        "UV_DEFAULT_INDEX": "https://mirror.example.com/simple",
        "UV_INDEX": "https://one.example.com/simple https://two.example.com/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/wheels",
    }


def test_variables_of_uv_take_precedence_over_pips_configuration() -> None:
    found = install.uv_environment(PIP_CONFIG, {"UV_DEFAULT_INDEX": "https://pypi.org/simple"})
    assert "UV_DEFAULT_INDEX" not in found
    assert found["UV_FIND_LINKS"] == "/wheels"


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[install.Setup]:
    monkeypatch.delenv("INSTALLER", raising=False)
    monkeypatch.setattr(install, "find_pip", lambda: ("pip",))
    return install.Setup(tmp_path)


def test_pip_installs_where_uv_cannot_be_installed(
    setup: install.Setup, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(command: list[str]) -> None:
        assert command[:1] == ["pip"]
        assert "--require-hashes" in command
        raise InstallationFailed

    monkeypatch.setattr(install, "find_uv", lambda: None)
    monkeypatch.setattr(setup, "_run", fail)
    assert setup.find_installer() == install.make_pip_installer(["pip"])
    assert "uv cannot be installed, so pip installs the packages" in capsys.readouterr().out


def test_pip_installs_if_the_setting_says_so(setup: install.Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTALLER", "pip")
    assert setup.find_installer() == install.make_pip_installer(["pip"])


def test_an_unknown_installer_is_an_error(setup: install.Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTALLER", "conda")
    with pytest.raises(InstallationFailed, match="INSTALLER=conda: set it to uv or pip"):
        setup.find_installer()
