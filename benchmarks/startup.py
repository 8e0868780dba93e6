"""The start of the platform by step: `millrace up` with a new data directory (first), and again with the same (second).

    python -m benchmarks.startup [--runs 3] [--starts first second]
    python -m benchmarks.startup --wheel dist/FILE.whl
    python -m benchmarks.startup --clone HEAD OTHER

Each row is a median over the runs: the seconds that a step took, and the seconds from the command to its end. Steps
overlap. `first token` is the first token of the default model, which the benchmark requests until it is answered.
After the last second start, it prints the memory (proportional set size) and the CPU time at rest of each process.

With `--wheel`, the wheel is installed by pip into a new environment outside of the checkout, with the extra `server`.
With `--clone`, each of the commits is cloned in turn and started by `make up`, until its first token. Both install with
empty package caches. What the package index takes is part of the time.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.options import parse
from millrace.local.program import free_port

ROOT = Path(__file__).parents[1]
MODEL = "smollm2-135m"
LIMIT_SECONDS = 1200.0  # one start, with the installation
POLL_SECONDS = 0.1
SETTLE_SECONDS = 10.0  # between the start and the measurement at rest
_STEP = re.compile(r"  (?:✓|ok) (.+?) +(\d+\.\d) s$")
_TICKS = os.sysconf("SC_CLK_TCK")


class Installation(NamedTuple):
    """How an installed platform is started."""

    command: tuple[str, ...] = (sys.executable, "-m", "millrace.cli", "up")
    directory: Path | None = None  # working directory of the command; None: the current one
    environ: Mapping[str, str] = os.environ


class StepTime(NamedTuple):
    seconds: float
    end: float  # since the command


class ProcessUsage(NamedTuple):
    """What a process uses."""

    memory_mib: float
    cpu_seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="default 3")
    parser.add_argument(
        "--starts", nargs="+", choices=("first", "second"), default=["first", "second"], help="default: both"
    )
    parser.add_argument("--rest", type=float, default=30.0, help="seconds measured at rest; default 30")
    parser.add_argument("--wheel", type=Path, help="measure this wheel instead of the checkout")
    parser.add_argument("--clone", nargs="+", metavar="COMMIT", default=[], help="measure clones of these commits")
    options = parse(parser, {"runs": 1, "starts": ["second"], "rest": 1.0})
    if options.clone:
        tables = {f"clone of {commit}": [] for commit in options.clone}
        for _ in range(options.runs):
            for commit in options.clone:
                tables[f"clone of {commit}"].append(measure_clone(commit))
    else:
        tables = measure_starts(options.runs, options.starts, options.rest, options.wheel)
    for start, runs in tables.items():
        print(f"\n{start:<44} {'seconds':>8} {'end':>8}")
        for title in runs[0]:
            times = [run[title] for run in runs if title in run]
            print(f"{title:<44} {median(t.seconds for t in times):>8.1f} {median(t.end for t in times):>8.1f}")


def measure_starts(
    runs: int, starts: Sequence[str], rest_seconds: float, wheel: Path | None
) -> dict[str, list[dict[str, StepTime]]]:
    """Return the steps of each run, by the start."""
    tables: dict[str, list[dict[str, StepTime]]] = {f"{name} start": [] for name in starts}
    for number in range(runs):
        with make_directory() as place:
            installation, port = Installation(), free_port()  # a changed port is a changed setting
            if wheel is not None:
                began = time.monotonic()
                installation = install_wheel(wheel, place)
                seconds = time.monotonic() - began
                tables.setdefault("installation", []).append({"packages": StepTime(seconds, seconds)})
            data_dir = place / "data"
            for start in ("first", "second"):
                if start == "second" and start not in starts:
                    break
                with run_platform(data_dir, port, installation) as (process, steps):
                    if start in starts:
                        tables[f"{start} start"].append(steps)
                    if start == "second" and number == runs - 1:
                        report_rest(process.pid, rest_seconds)
            remove_outside(data_dir)
    return tables


def measure_clone(commit: str) -> dict[str, StepTime]:
    """Clone a commit, start it by `make up` until its first token, and return the steps from the clone on."""
    with make_directory() as place:
        began = time.monotonic()
        run_command(place, "git", "clone", "--quiet", "--no-checkout", str(ROOT), "clone")
        run_command(place / "clone", "git", "checkout", "--quiet", commit)
        installation = Installation(("make", "up"), place / "clone", environ_with_empty_caches(place))
        with run_platform(place / "data", free_port(), installation, began=began, until_token=True) as (_, steps):
            pass
        remove_outside(place / "data")
        return steps


def install_wheel(wheel: Path, place: Path) -> Installation:
    """Install a wheel with the extra `server` into a new environment, and return how it is started."""
    environ = environ_with_empty_caches(place)
    run_command(place, sys.executable, "-m", "venv", "venv", environ=environ)
    run_command(place, "venv/bin/pip", "install", "--quiet", f"{wheel.resolve()}[server]", environ=environ)
    return Installation((str(place / "venv/bin/millrace"), "up"), place, environ)


def run_command(directory: Path, *command: str, environ: Mapping[str, str] = os.environ) -> None:
    subprocess.run(command, cwd=directory, env=environ, check=True)  # noqa: S603


def environ_with_empty_caches(place: Path) -> dict[str, str]:
    """Return an environment without this checkout's variables, in which pip and uv have empty caches."""
    own = ("MILLRACE_", "DJANGO_", "PYTHON", "VIRTUAL_ENV")
    caches = {name: str(place / "cache" / name) for name in ("PIP_CACHE_DIR", "UV_CACHE_DIR", "XDG_CACHE_HOME")}
    return {name: value for name, value in os.environ.items() if not name.startswith(own)} | caches


@contextmanager
def make_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="millrace-startup-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o711)  # PostgreSQL may run as another user
        yield Path(name)


@contextmanager
def run_platform(
    data_dir: Path,
    port: int,
    installation: Installation = Installation(),  # noqa: B008 - it is immutable
    *,
    began: float | None = None,
    until_token: bool = False,
) -> Iterator[tuple[subprocess.Popen[str], dict[str, StepTime]]]:
    """Run the platform until the block ends. Its steps are complete when the block begins.

    Args:
        began: when the time starts; None: with the command.
        until_token: begin the block after the first token, even if processes are still starting.
    """
    settings = {"MILLRACE_DATA_DIR": str(data_dir), "MILLRACE_PORT": str(port), "PYTHONIOENCODING": "utf-8"}
    environ = {**installation.environ, **settings}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # as `make up` does
    began = time.monotonic() if began is None else began
    process = subprocess.Popen(  # noqa: S603
        installation.command,
        cwd=installation.directory,
        env=environ,
        start_new_session=True,  # Ctrl-C reaches `make` and the supervisor
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
    )
    lines: list[str] = []
    steps: dict[str, StepTime] = {}
    is_complete = threading.Event()

    def read() -> None:
        for line in process.stdout or ():
            lines.append(line)
            now = time.monotonic() - began
            if found := _STEP.match(line.rstrip("\n")):
                steps[found[1]] = StepTime(float(found[2]), now)
            elif line.startswith("Starting Millrace"):
                steps["packages installed"] = StepTime(now, now)
            elif line.startswith("Press Ctrl-C"):
                steps["URL printed"] = StepTime(now, now)
            elif line.startswith("All processes are running"):
                steps["all processes"] = StepTime(now, now)
                is_complete.set()
        is_complete.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        first_token = wait_for_token(process, data_dir, port, began + LIMIT_SECONDS)
        if not until_token:
            is_complete.wait(began + LIMIT_SECONDS - time.monotonic())
        if process.poll() is not None or not (until_token or "all processes" in steps):
            raise SystemExit("the platform did not start:\n" + "".join(lines))
        steps["first token"] = StepTime(first_token - began, first_token - began)
        yield process, steps
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        process.wait()
        reader.join()


def wait_for_token(process: subprocess.Popen[str], data_dir: Path, port: int, deadline: float) -> float:
    """Request an answer until a token arrives. Return its time, or that of the end of the process."""
    while time.monotonic() < deadline and process.poll() is None:
        try:
            key = json.loads((data_dir / "credentials.json").read_text(encoding="utf-8"))["demo_key"]
            if receives_token(port, key):
                return time.monotonic()
        except (OSError, ValueError, http.client.HTTPException):
            pass
        time.sleep(POLL_SECONDS)
    return time.monotonic()


def receives_token(port: int, key: str) -> bool:
    """Return whether a streamed request is answered. It waits for the first token."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        "max_tokens": 1,
        "stream": True,
    }
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        return response.status == http.client.OK and any(b'"content":"' in line for line in response)
    finally:
        connection.close()


def report_rest(supervisor: int, seconds: float) -> None:
    """Print the memory and the CPU time of each process of the platform while it has no requests."""
    time.sleep(min(SETTLE_SECONDS, seconds))
    before, began = read_usage(supervisor), time.monotonic()
    time.sleep(seconds)
    after, elapsed = read_usage(supervisor), time.monotonic() - began
    total = ProcessUsage(0.0, 0.0)
    print(f"\n{'at rest':<44} {'MiB':>8} {'% CPU':>8}")
    for name, usage in sorted(after.items(), key=lambda item: -item[1].memory_mib):
        share = (usage.cpu_seconds - before.get(name, usage).cpu_seconds) / elapsed
        total = ProcessUsage(total.memory_mib + usage.memory_mib, total.cpu_seconds + share)
        print(f"{name:<44} {usage.memory_mib:>8.0f} {share:>8.1%}")
    print(f"{'total':<44} {total.memory_mib:>8.0f} {total.cpu_seconds:>8.1%}")


def read_usage(supervisor: int) -> dict[str, ProcessUsage]:
    """Return what the platform's processes use, by name. Each child of the supervisor counts with its descendants."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(path.name)], ticks[int(path.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    found: dict[str, ProcessUsage] = {}
    for pid in parents:
        child = pid
        while parents.get(child, 0) not in (0, supervisor) and child != supervisor:
            child = parents[child]
        if child != supervisor and parents.get(child) != supervisor:
            continue
        try:
            name, memory = name_process(child), read_pss(pid)
        except OSError:
            continue
        usage = found.get(name, ProcessUsage(0.0, 0.0))
        found[name] = ProcessUsage(usage.memory_mib + memory, usage.cpu_seconds + ticks[pid] / _TICKS)
    return found


def name_process(pid: int) -> str:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    words = [Path(command[0]).name, *(word for word in command[1:] if word and not word.startswith("-"))]
    environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    model = next((each.partition("=")[2] for each in environ if each.startswith("MILLRACE_WORKER_MODEL=")), "")
    return " ".join([*(words[1:3] if words[0].startswith("python") else words[:1]), *([model] if model else [])])


def read_pss(pid: int) -> float:
    """Return the proportional set size of a process in MiB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1024


def remove_outside(data_dir: Path) -> None:
    """Remove PostgreSQL's data if it is outside of the data directory."""
    state = json.loads((data_dir / "postgres.json").read_text(encoding="utf-8"))
    shutil.rmtree(state["directory"], ignore_errors=True)


if __name__ == "__main__":
    main()
