"""`platform/` is a source root and must not shadow the standard library's module of the same name."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = "import platform; print(platform.system(), platform.__file__)"


def standard(said: str) -> bool:
    return platform.__file__ in said and f"{os.uname().sysname} " in said


def test_platform_is_not_a_package() -> None:
    assert not (ROOT / "platform" / "__init__.py").exists()


def test_under_pytest() -> None:
    assert Path(platform.__file__) == Path(os.__file__).with_name("platform.py")
    assert platform.system() == os.uname().sysname


@pytest.mark.parametrize(
    "arguments",
    [
        ["manage.py", "shell", "--no-imports", "-c", SCRIPT],
        ["-c", f"import millrace.conf.celery; {SCRIPT}"],
        ["-c", f"import uvicorn.importer as i; i.import_from_string('millrace.conf.asgi:application'); {SCRIPT}"],
        ["-c", f"import inference_worker.worker.app; {SCRIPT}"],
    ],
    ids=["manage.py", "celery app", "asgi", "worker"],
)
def test_in_every_process(arguments: list[str]) -> None:
    said = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)
    assert standard(said.stdout), said.stderr


def test_under_the_celery_command() -> None:
    command = [sys.executable, "-m", "celery", "--app=millrace.conf.celery", "report"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert f"system:{os.uname().sysname}" in said.stdout, said.stderr
