"""`make bench-quick`: it finds every benchmark, each has a quick mode, and a failing one fails the run."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cpu, run_quick, tables

ROOT = Path(__file__).resolve().parents[3]


def tree(name: str) -> ast.Module:
    return ast.parse((run_quick.DIRECTORY / f"{name}.py").read_text(encoding="utf-8"))


def calls(module: ast.Module, name: str) -> list[ast.Call]:
    """Return the calls of a function or method with this name."""
    found = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
    return [call for call in found if getattr(call.func, "attr", getattr(call.func, "id", None)) == name]


def test_every_executable_module_is_a_benchmark_or_a_known_program() -> None:
    paths = run_quick.DIRECTORY.glob("*.py")
    runs = {path.stem for path in paths if '__name__ == "__main__"' in path.read_text("utf-8")}
    assert set(run_quick.discover()) == runs - run_quick.NOT_BENCHMARKS
    assert runs >= run_quick.NOT_BENCHMARKS
    assert {"gateway", "gpu", "serve", "settler"} <= runs


@pytest.mark.parametrize("name", run_quick.discover())
def test_every_benchmark_has_a_quick_mode_and_documented_options(name: str) -> None:
    module = tree(name)
    options = calls(module, "add_argument")
    own = any(isinstance(arg, ast.Constant) and arg.value == "--quick" for call in options for arg in call.args)
    assert own or calls(module, "parse"), "no --quick: parse the arguments with benchmarks.options.parse"
    assert ast.get_docstring(module)
    assert any(word.arg == "description" for call in calls(module, "ArgumentParser") for word in call.keywords)
    without = [ast.unparse(call) for call in options if "help" not in {word.arg for word in call.keywords}]
    assert without == []


GOOD = """
if __name__ == "__main__":
    import sys
    assert sys.argv[1:] == ["--quick"]
"""
BAD = """
if __name__ == "__main__":
    print("the reason")
    raise SystemExit(3)
"""


def test_a_failing_benchmark_fails_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, text in {"good": GOOD, "bad": BAD, "helper": "X = 1\n"}.items():
        (folder / f"{name}.py").write_text(text)
    assert run_quick.main([], folder) == 1
    said = capsys.readouterr().out
    assert "the reason" in said and "exit status 3" in said and "failed: bad\n" in said
    assert "helper" not in said
    assert run_quick.main(["good"], folder) == 0
    with pytest.raises(SystemExit):
        run_quick.main(["helper"], folder)


def test_a_hanging_benchmark_is_stopped_and_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_quick, "STOP_SECONDS", 2.0)  # in the background of a shell, SIGINT is ignored
    script = 'if __name__ == "__main__":\n    import time\n    print("begun", flush=True)\n    time.sleep(600)\n'
    (tmp_path / "slow.py").write_text(script)
    failure = run_quick.run("slow", limit_seconds=2, directory=tmp_path)
    assert failure is not None and "not finished after 2 s" in failure


def test_large_tables_are_not_filled_without_enough_free_space() -> None:
    tables.check_free_space(20_000_000, 80 * 10**9)
    with pytest.raises(SystemExit, match=r"20,000,000 events need 80 GB, but .* has 79 GB free"):
        tables.check_free_space(20_000_000, 79 * 10**9)


def test_ci_runs_them() -> None:
    assert "make bench-quick" in (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()


def test_parts_of_a_cpu_measurement_are_merged_by_load() -> None:
    def row(server: str, streams: int, rate: float) -> dict[str, Any]:
        return {"server": server, "streams": streams, "input": 128, "shared_prefix": 0, "tokens_per_second": rate}

    first = {"date": "a", "served": [row("vllm", 1, 10), row("millrace", 1, 20), row("vllm", 8, 40)], "platform": []}
    second = {"date": "b", "served": [row("millrace", 8, 60), row("vllm", 8, 50)], "prefill": [row("vllm", 1, 5)]}
    merged = cpu.merge(first, second)
    assert merged["date"] == "b"
    # The rows of a load come from one run, also those of a server that only the earlier run measured.
    assert [(r["server"], r["streams"], r["tokens_per_second"]) for r in merged["served"]] == [
        ("vllm", 1, 10), ("millrace", 1, 20), ("millrace", 8, 60), ("vllm", 8, 50),
    ]  # fmt: skip
    assert [r["tokens_per_second"] for r in merged["prefill"]] == [5]
    ratios = {name: round(value, 2) for name, value in merged["ratios"].items()}
    assert ratios == {
        f"served, millrace, {streams} streams, 0 shared: tokens_per_second relative to vLLM": ratio
        for streams, ratio in ((1, 2.0), (8, 1.2))
    }
