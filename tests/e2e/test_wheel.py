"""The wheel outside a checkout: the client and the command line alone, and the platform with the extra `server`.

No package is downloaded. The environments use the packages that are installed here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import httpx2
import pytest
from packaging.requirements import Requirement

from tests.support.stack import START_SECONDS, eventually, free_port, wait_for_output
from tools.build_files import generated_files

ROOT = Path(__file__).parents[2]
CLIENT_PACKAGES = ("click", "httpx2", "rich")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (found,) = directory.glob("*.whl")
    return found


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that PostgreSQL can reach if it runs as another user."""
    with tempfile.TemporaryDirectory(prefix="millrace-wheel-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o711)
        yield Path(name)


def environment(folder: Path, wheel: Path) -> Path:
    """Create a virtual environment with only the wheel, and return its site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    command = [sys.executable, "-m", "pip", "--python", str(folder / "venv/bin/python"), "install", "--no-deps"]
    subprocess.run([*command, "--no-compile", str(wheel)], check=True, capture_output=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    return site


def with_dependencies(names: tuple[str, ...]) -> set[str]:
    """Return the distributions that the named ones need on this machine."""
    found: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found.add(name)
        for requirement in map(Requirement, metadata.requires(name) or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                pending.append(requirement.name)
    return found


def link(name: str, site: Path) -> None:
    """Make an installed distribution importable in another environment."""
    distribution = metadata.distribution(name)
    for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
        if not (site / top).exists():
            (site / top).symlink_to(Path(str(distribution.locate_file(top))))


def outside(folder: Path) -> dict[str, str]:
    """Return an environment without the checkout's variables."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("MILLRACE_", "DJANGO_", "PYTHON"))
    }
    return kept | {"XDG_CONFIG_HOME": str(folder / "config")}


def test_the_wheel_contains_the_generated_files(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    outputs = [output.relative_to(ROOT) for files in generated_files() for output in files.outputs]
    assert outputs
    assert {str(output).removeprefix("platform/") for output in outputs} <= names
    assert not [name for name in names if name.endswith(".po")]  # the source of the compiled translations


def test_the_client_and_the_command_line_without_server_packages(wheel, folder):
    site = environment(folder, wheel)
    for name in with_dependencies(CLIENT_PACKAGES):
        link(name, site)
    assert not (site / "django").exists()

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        binary = str(folder / "venv/bin" / command[0])
        return subprocess.run(
            [binary, *command[1:]], cwd=folder, env=outside(folder), capture_output=True, text=True, check=False
        )

    imported = run(
        "python", "-c", "import millrace.client, sys; print(millrace.client.__file__, 'django' in sys.modules)"
    )
    assert imported.stdout.strip() == f"{site / 'millrace/client/__init__.py'} False", imported.stderr
    assert "Manage API keys." in run("millrace", "--help").stdout
    assert run("millrace", "keys").returncode == 3
    up = run("millrace", "up")
    assert (up.returncode, "pip install 'FILE.whl[server]'" in up.stderr) == (1, True)


def test_platform_answers_outside_a_checkout(wheel, folder):
    site = environment(folder, wheel)
    (site / "installed-here.pth").write_text(f"{Path(httpx2.__file__).parents[1]}\n")  # without the checkout's own .pth
    port, log = free_port(), folder / "up.log"
    work = folder / "work"
    work.mkdir(mode=0o711)
    settings = {
        "MILLRACE_PORT": str(port),
        "MILLRACE_MODELS": "smollm2-135m=embedded?dtype=float32,all-minilm-l6-v2=embedded:minilm",
        "MILLRACE_WORKER_ON_DEMAND_MODELS": "all-minilm-l6-v2",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(folder / "venv/bin/millrace"), "up"], cwd=work, env=outside(folder) | settings, stdout=out, stderr=out
        )
    try:
        wait_for_output(process, log, "Millrace is ready")
        key = json.loads((work / ".millrace/credentials.json").read_text())["demo_key"]
        body = {
            "model": "smollm2-135m",
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 4,
            "stream": True,
        }
        url, headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {key}"}
        answer = httpx2.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=START_SECONDS)
        assert answer.status_code == 200, answer.text
        assert answer.text.rstrip().endswith("data: [DONE]")
        wait_for_output(process, log, "All processes are running")
        assert not (work / ".millrace/logs/worker-all-minilm-l6-v2.log").exists()
        check = "model all-minilm-l6-v2"
        eventually(lambda: httpx2.get(f"{url}/readyz", timeout=60).json()["checks"][check] == "ok")
        body = {"model": "all-minilm-l6-v2", "input": "Hi"}
        for _ in range(2):  # the first request waits until the model is loaded
            answer = httpx2.post(f"{url}/v1/embeddings", json=body, headers=headers, timeout=START_SECONDS)
            assert answer.status_code == 200, answer.text
        page = httpx2.get(f"{url}/login", timeout=60)
        assert page.status_code == 200
        style = page.text.split('rel="stylesheet" href="')[1].split('"')[0]
        assert httpx2.get(f"{url}{style}", timeout=60).status_code == 200
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()
