"""Runs every benchmark with `--quick`: `python -m benchmarks.run_quick`. Fails if one fails.

A benchmark is a module of this directory that can be run (`if __name__ == "__main__":`). New benchmarks are found
automatically. A quick run only shows that the benchmarks work; its results are meaningless. Therefore two run at a
time.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

DIRECTORY = Path(__file__).resolve().parent
ROOT = DIRECTORY.parent
NOT_BENCHMARKS = {"engine_process", "instant_worker", "run_quick"}  # parts of other benchmarks, and this module
LIMIT_SECONDS = 180.0  # per benchmark; each takes a few seconds on an idle machine
MAX_TOTAL_SECONDS = 900.0  # sum of all benchmarks
JOBS = 2  # each waits for timers much of the time
STOP_SECONDS = 30.0


def discover(directory: Path = DIRECTORY) -> list[str]:
    """Return the names of all benchmarks, sorted."""
    return [path.stem for path in sorted(directory.glob("*.py")) if path.stem not in NOT_BENCHMARKS and _runs(path)]


def _runs(path: Path) -> bool:
    """Return whether the module can be run as the main program."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tests = (node.test for node in tree.body if isinstance(node, ast.If))
    return any(isinstance(node, ast.Name) and node.id == "__name__" for test in tests for node in ast.walk(test))


def run(name: str, limit_seconds: float = LIMIT_SECONDS, directory: Path = DIRECTORY) -> str | None:
    """Run one benchmark with --quick. Return None, or the reason of the failure with the output."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "platform")])}
    environ.setdefault("OMP_NUM_THREADS", "1")  # so that times are similar on a busy machine
    command = [sys.executable, "-m", f"{directory.name}.{name}", "--quick"]
    with subprocess.Popen(  # noqa: S603  (our own module)
        command,
        cwd=directory.parent,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # so that it stops its services
            try:
                printed, _ = process.communicate(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and its children, which have its output open
                printed = _rest(process)
            return f"{printed}\nnot finished after {limit_seconds:.0f} s"
    return f"{printed}\nexit status {process.returncode}" if process.returncode else None


def _rest(process: subprocess.Popen[str]) -> str:
    """Return the rest of a killed process's output, unless a process outside of its group still has it open."""
    try:
        return process.communicate(timeout=STOP_SECONDS)[0]
    except subprocess.TimeoutExpired:
        return "(its output is still open in another process)"


def _run_all(names: Sequence[str], directory: Path) -> list[str]:
    """Run these benchmarks, print the result of each when it ends, and return the names of those that failed."""
    end = time.monotonic() + MAX_TOTAL_SECONDS

    def has_failed(name: str) -> bool:
        began = time.monotonic()
        failure = run(name, max(1.0, min(LIMIT_SECONDS, end - began)), directory)
        line = f"{name:12} {'failed' if failure else 'ok':6} {time.monotonic() - began:6.1f} s"
        print(f"{line}\n{failure}" if failure else line, flush=True)
        return failure is not None

    pool = ThreadPoolExecutor(JOBS)
    try:
        return [name for name, failed in zip(names, pool.map(has_failed, names), strict=True) if failed]
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, no other benchmark starts


def main(arguments: Sequence[str] | None = None, directory: Path = DIRECTORY) -> int:
    """Run the benchmarks. Return 0 if all of them succeeded, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run_quick",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help="benchmarks to run (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names of the benchmarks and exit")
    options = parser.parse_args(arguments)
    found = discover(directory)
    if options.list:
        print("\n".join(found))
        return 0
    if unknown := sorted(set(options.names) - set(found)):
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(found)}")
    failed = _run_all(options.names or found, directory)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
