"""The supervisor with small real processes."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from millrace.environment.processes import ProcessState
from millrace.local import supervisor as module
from millrace.local.program import Program, is_still_running
from millrace.local.supervisor import ChildFailed, Supervisor
from tests.support.waiting import eventually, eventually_async

Made = tuple[Supervisor, list[str]]


def shell(name: str, script: str, **options: object) -> Program:
    return Program(name, ("/bin/sh", "-c", script), environ={"PATH": os.defpath}, **options)  # type: ignore[arg-type]


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[Made]:
    log_lines: list[str] = []
    supervisor = Supervisor(tmp_path, log_lines.append)
    yield supervisor, log_lines
    hurry = asyncio.Event()
    hurry.set()
    await supervisor.stop(hurry)


async def test_a_child_that_dies_is_restarted(made: Made) -> None:
    supervisor, log_lines = made
    supervisor.add([shell("a", "exec sleep 60")])
    await supervisor.start("a")
    first = supervisor.pid("a")
    assert first
    os.kill(first, signal.SIGKILL)
    await eventually_async(lambda: supervisor.pid("a") not in (None, first))
    assert len(log_lines) == 1
    assert "a was killed by SIGKILL; starting it again in 0.25 s" in log_lines[0]


async def test_every_exit_is_reported_before_the_next_start(made: Made) -> None:
    supervisor, _ = made
    running: list[int | None] = []
    supervisor.add([shell("a", "exec sleep 60", on_exit=lambda: running.append(supervisor.pid("a")))])
    await supervisor.start("a")
    for signum in (signal.SIGKILL, signal.SIGTERM):
        pid = supervisor.pid("a")
        assert pid
        os.kill(pid, signum)
        await eventually_async(lambda: supervisor.pid("a") not in (None, pid))  # noqa: B023 - awaited before pid changes
    assert running == [None, None]
    hurry = asyncio.Event()
    await supervisor.stop(hurry)
    assert running == [None, None, None]


async def test_a_child_that_keeps_dying_makes_the_start_fail_with_the_end_of_its_log(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.01)
    supervisor, log_lines = made
    supervisor.add([shell("good", "exec sleep 60"), shell("bad", "echo the reason; exit 3", reports_ready=True)])
    await supervisor.start("good")
    with pytest.raises(ChildFailed):
        await supervisor.start("bad")
    with pytest.raises(ChildFailed, match=r"bad ended with status 3, 5 times before(.|\n)*the reason"):
        await asyncio.wait_for(supervisor.finish_start(), 10)
    with pytest.raises(ChildFailed, match="bad ended with status 3"):
        await asyncio.wait_for(supervisor.watch(), 10)
    assert [line.split(" in ")[1].split()[0] for line in log_lines] == ["0.01", "0.02", "0.04", "0.08"]
    assert supervisor.pid("good")  # stopped by the caller, in order


async def test_the_start_of_a_child_that_keeps_dying_fails(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.01)
    supervisor, _ = made
    supervisor.add([shell("bad", "exit 1", ready=lambda: False)])
    with pytest.raises(ChildFailed, match="bad ended with status 1"):
        await supervisor.start("bad")


async def test_after_the_start_repeated_deaths_stop_no_other_child(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause grows to its maximum, other children are not affected, and the state is published."""
    monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(module, "MAX_PAUSE_SECONDS", 0.05)
    supervisor, log_lines = made
    broken = tmp_path / "broken"
    supervisor.add(
        [shell("good", "exec sleep 60"), shell("bad", f"test -e {broken} && exit 3; while sleep 0.02; do :; done")]
    )
    await supervisor.start("good")
    await supervisor.start("bad")
    await supervisor.finish_start()
    good, bad = supervisor.pid("good"), supervisor.pid("bad")
    assert good
    assert bad
    watching = asyncio.create_task(supervisor.watch())
    broken.touch()
    os.kill(bad, signal.SIGKILL)
    await eventually_async(lambda: len(log_lines) >= 9)
    assert [line.split(" in ")[1].split()[0] for line in log_lines[:5]] == ["0.01", "0.02", "0.04", "0.05", "0.05"]
    assert supervisor.pid("good") == good
    assert not watching.done()
    broken.unlink()
    await eventually_async(lambda: supervisor.pid("bad"))
    watching.cancel()


async def test_a_program_that_is_deleted_after_the_start_is_retried(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.01)
    supervisor, log_lines = made
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    supervisor.add([Program("moved", (str(program),), environ={"PATH": os.defpath})])
    await supervisor.start("moved")
    await supervisor.finish_start()
    first = supervisor.pid("moved")
    assert first
    program.rename(tmp_path / "elsewhere")
    os.kill(first, signal.SIGKILL)
    await eventually_async(lambda: any("moved cannot be started" in line for line in log_lines))
    (tmp_path / "elsewhere").rename(program)
    await eventually_async(lambda: supervisor.pid("moved") not in (None, first))


async def test_the_pause_is_reset_after_a_long_run(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(module, "HEALTHY_SECONDS", 0.1)
    supervisor, log_lines = made
    published: list[list[ProcessState]] = []
    supervisor._publish_states = lambda states: published.append(list(states))
    supervisor.add([shell("a", "sleep 0.3")])
    await supervisor.start("a")
    await eventually_async(lambda: len(log_lines) == 3)
    assert [line.split(" in ")[1].split()[0] for line in log_lines] == ["0.01"] * 3
    assert ProcessState("a", True) in [
        msgspec.structs.replace(one, last_end="", next_start_at=0) for (one,) in published[3:]
    ]


async def test_a_full_disk_prevents_no_start(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the child's log nor the published state can be written on a full disk."""
    supervisor, _ = made

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    supervisor._publish_states = full
    monkeypatch.setattr(Path, "open", full)
    supervisor.add([shell("a", "echo a word; exec sleep 60")])
    await supervisor.start("a")
    assert supervisor.pid("a")


async def test_the_error_for_a_missing_program_names_it(made: Made) -> None:
    supervisor, _ = made
    supervisor.add([Program("ghost", ("/nowhere/ghost",))])
    with pytest.raises(ChildFailed, match=r"ghost cannot be started: .*No such file"):
        await supervisor.start("ghost")


async def test_the_start_waits_for_readiness_with_a_timeout(made: Made, tmp_path: Path) -> None:
    supervisor, _ = made
    flag, log = tmp_path / "flag", tmp_path / "never.log"

    def never() -> bool:
        eventually(lambda: "thinking" in log.read_text())
        return False

    supervisor.add(
        [
            shell("slow", f"sleep 0.3; touch {flag}; exec sleep 60", ready=flag.exists),
            shell("never", "echo thinking; exec sleep 60", ready=never, ready_seconds=0.3),
        ]
    )
    await supervisor.start("slow")
    assert flag.exists()
    with pytest.raises(ChildFailed, match=r"never is not ready after 0 s\n(.|\n)*thinking"):
        await supervisor.start("never")


async def test_the_start_waits_until_a_child_reports_that_it_is_ready(made: Made, tmp_path: Path) -> None:
    """A process that ends before its report, or that was ready before it ended, is not ready."""
    supervisor, log_lines = made
    flag = tmp_path / "flag"
    begin = f"test -e {flag} || {{ touch {flag}; exit 1; }}; sleep 0.3"
    slow = f"{begin}; touch {flag}.ready; echo > /dev/fd/$READY_FD; exec sleep 60"
    supervisor.add(
        [
            shell("slow", slow, reports_ready=True),
            shell("silent", "exec sleep 60", reports_ready=True, ready_seconds=0.3),
        ]
    )
    await supervisor.start("slow")
    assert Path(f"{flag}.ready").exists()
    assert len(log_lines) == 1
    with pytest.raises(ChildFailed, match="silent is not ready after 0 s"):
        await supervisor.start("silent")


async def test_the_start_ends_only_when_every_child_is_ready(made: Made, tmp_path: Path) -> None:
    """A child that ended after its start was ready must become ready again."""
    supervisor, _ = made
    flag = tmp_path / "flag"
    again = f"sleep 0.3; touch {flag}.again; echo > /dev/fd/$READY_FD; exec sleep 60"
    script = f"test -e {flag} && {{ {again}; }}; touch {flag}; echo > /dev/fd/$READY_FD; exec sleep 60"
    supervisor.add([shell("a", script, reports_ready=True)])
    await supervisor.start("a")
    first = supervisor.pid("a")
    assert first
    os.kill(first, signal.SIGKILL)
    await eventually_async(lambda: supervisor.pid("a") != first)
    await asyncio.wait_for(supervisor.finish_start(), 5)
    assert Path(f"{flag}.again").exists()


async def test_children_are_stopped_in_reverse_order(made: Made, tmp_path: Path) -> None:
    supervisor, log_lines = made
    record = tmp_path / "record"
    script = "trap 'echo {0} >> {1}; exit 0' TERM; touch {1}.{0}; while :; do sleep 0.02; done"
    names = ["a", "b", "c"]
    supervisor.add([shell(name, script.format(name, record)) for name in names])
    for name in ("b", "c", "a"):  # the order of starting does not matter
        await supervisor.start(name)
    await eventually_async(lambda: all(Path(f"{record}.{name}").exists() for name in names))
    await supervisor.stop(asyncio.Event())
    assert record.read_text().split() == ["c", "b", "a"]
    assert not any(supervisor.pid(name) for name in names)
    assert log_lines == []  # none was treated as dead


async def test_a_child_that_does_not_stop_is_killed(made: Made, tmp_path: Path) -> None:
    supervisor, log_lines = made
    flag = tmp_path / "flag"
    script = f"trap '' TERM; touch {flag}; while :; do sleep 0.05; done"
    supervisor.add([shell("deaf", script, stop_seconds=0.2)])
    await supervisor.start("deaf")
    await eventually_async(flag.exists)
    await supervisor.stop(asyncio.Event())
    assert supervisor.pid("deaf") is None
    assert log_lines == ["deaf does not end; killing it"]


async def test_a_second_ctrl_c_does_not_wait(made: Made, tmp_path: Path) -> None:
    supervisor, _ = made
    flag = tmp_path / "flag"
    supervisor.add([shell("deaf", f"trap '' TERM; touch {flag}; while :; do sleep 0.05; done", stop_seconds=60)])
    await supervisor.start("deaf")
    await eventually_async(flag.exists)
    hurry = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, hurry.set)
    await asyncio.wait_for(supervisor.stop(hurry), 5)
    assert supervisor.pid("deaf") is None


async def test_leftover_processes_of_a_dead_child_are_killed(made: Made, tmp_path: Path) -> None:
    supervisor, _ = made
    note = tmp_path / "pid"
    supervisor.add([shell("parent", f"sleep 77 & echo $! > {note}; exec sleep 60")])
    await supervisor.start("parent")
    await eventually_async(lambda: note.exists() and note.read_text().strip())
    left, parent = int(note.read_text()), supervisor.pid("parent")
    assert is_still_running(left, "sleep 77")
    assert parent
    os.kill(parent, signal.SIGKILL)
    await eventually_async(lambda: not is_still_running(left, "sleep 77"))


HOST = """
import asyncio, sys
from pathlib import Path
from millrace.local.supervisor import Supervisor
from millrace.environment.processes import ProcessState
from millrace.local.program import Program, UnixUser
async def main():
    supervisor = Supervisor(Path(sys.argv[1]), print)
    user = UnixUser(int(sys.argv[2]), int(sys.argv[2])) if sys.argv[2] else None
    supervisor.add([Program("child", ("/bin/sleep", "78"), user=user)])
    await supervisor.start("child")
    print(supervisor.pid("child"), flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells children of their parent's death")
@pytest.mark.parametrize("user", ["", "65534"])
def test_children_die_with_a_killed_supervisor(tmp_path: Path, user: str) -> None:
    mine = "" if os.geteuid() else user  # only root can run a child as another user
    host = subprocess.Popen([sys.executable, "-c", HOST, str(tmp_path), mine], stdout=subprocess.PIPE, text=True)
    assert host.stdout
    child = int(host.stdout.readline())
    assert is_still_running(child, "sleep 78")
    assert os.stat(f"/proc/{child}").st_uid == (int(mine) if mine else os.geteuid())
    host.kill()
    host.wait()
    host.stdout.close()
    eventually(lambda: not is_still_running(child, "sleep 78"))
