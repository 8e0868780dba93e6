"""The engines that `benchmarks.cpu` compares: Millrace, OpenVINO GenAI and llama.cpp, each in processes of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PEERS = Path(__file__).parent / "peers"


@dataclass(frozen=True)
class WeightType:
    """A type of weights: Millrace's options, and the peers' types of the same bits.

    options: of `EngineConfig` and of a deployment.
    openvino: the suffix of the exported model, or empty: not compared.
    llama_cpp: the suffix of the converted model, or empty: not compared.
    """

    options: dict[str, str]
    openvino: str = ""
    llama_cpp: str = ""


# The quantized types and their KV caches pass the gate of benchmarks/quality.py.
TYPES = {
    "default": WeightType({}, "bfloat16", "f16"),
    "int8": WeightType({"quantization": "int8", "kv_cache_dtype": "int8"}, "int8", "q8_0"),
    "int4": WeightType({"quantization": "int4", "kv_cache_dtype": "int8"}, "int4", "q4_1"),
}
# What a user gets only by a setting. These rows have no peers.
FORCED = {"pytorch": WeightType({"cpu_kernels": "pytorch"})}
# The variables that limit Millrace, PyTorch and OpenVINO to instruction sets. llama.cpp is built for each.
INSTRUCTION_SETS: dict[str, dict[str, str]] = {
    "all": {},
    "avx2": {
        "MILLRACE_CPU_KERNELS": "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "OV_CPU_MAX_ISA": "AVX2",
    },
}
Run = Callable[[list[list[int]], int], dict[str, float]]


@dataclass(frozen=True)
class EngineUnderTest:
    """An engine that is ready.

    run: completes token ids concurrently, each with a number of tokens. Its result has the `seconds`, the `tokens`, and
        the seconds until each prompt has a token, `first`.
    computes_with: its own words for the machine's features that it uses.
    """

    system: str
    type: str
    run: Run
    computes_with: str


def start_engines(peers: Path, model: Path, instruction_sets: str, running: ExitStack) -> Iterator[EngineUnderTest]:
    """Start the engines of all types, and return those that are installed."""
    environ = {**os.environ, **INSTRUCTION_SETS[instruction_sets]}
    threads = len(os.sched_getaffinity(0))
    own = {**environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "platform")])}
    for name, kind in (TYPES | FORCED).items():
        command = (sys.executable, "-m", "benchmarks.engine_process", str(model), json.dumps(kind.options))
        yield _start("millrace", name, command, own, running)
        if kind.openvino:
            python, exported = peers / "openvino" / "bin" / "python", peers / f"openvino-{kind.openvino}"
            if exported.exists():
                words = (str(PEERS / "openvino_engine.py"), str(exported), str(threads))
                yield _start("openvino", name, (str(python), *words), environ, running)
        program = peers / f"llama.cpp-{instruction_sets}" / "llama-batched-bench"
        if kind.llama_cpp and program.exists():
            words = ("-m", str(peers / f"{kind.llama_cpp}.gguf"), "-t", str(threads), "--output-format", "jsonl")
            command = (str(program), *words)
            yield EngineUnderTest("llama.cpp", name, partial(_run_llama_cpp, command), _find_backend(command))


def _start(
    system: str, name: str, command: tuple[str, ...], environ: dict[str, str], running: ExitStack
) -> EngineUnderTest:
    """Start a process that reads work and writes figures, one JSON object a line, after a line about itself."""
    process = running.enter_context(
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, cwd=ROOT)  # noqa: S603
    )
    running.callback(process.terminate)
    return EngineUnderTest(system, name, partial(_ask, process), json.loads(_read_line(process)))


def _ask(process: subprocess.Popen[str], prompts: list[list[int]], output: int) -> dict[str, float]:
    assert process.stdin
    process.stdin.write(json.dumps({"prompts": prompts, "output": output}) + "\n")
    process.stdin.flush()
    figures: dict[str, float] = json.loads(_read_line(process))
    return figures


def _read_line(process: subprocess.Popen[str]) -> str:
    """Return the next line of JSON. The peers' libraries write lines of their own to the same output.

    Raises:
        EOFError: the process has ended.
    """
    assert process.stdout
    for line in process.stdout:
        if line.startswith(("{", '"')):
            return line
    raise EOFError(f"{process.args!r} has ended")


def _run_llama_cpp(command: tuple[str, ...], prompts: list[list[int]], output: int) -> dict[str, float]:
    """Run llama.cpp's own benchmark, which draws the tokens itself and does not sample."""
    length, streams = len(prompts[0]), len(prompts)
    context = max(64, streams * (length + output))  # tokens; it fails with fewer
    words = ("-npp", str(length), "-ntg", str(output), "-npl", str(streams), "-c", str(context))
    run = subprocess.run((*command, *words), check=True, capture_output=True, text=True)  # noqa: S603
    figures = next(json.loads(line) for line in run.stdout.splitlines() if line.startswith("{"))
    return {"seconds": figures["t"], "first": figures["t_pp"], "tokens": float(streams * output)}


def _find_backend(command: tuple[str, ...]) -> str:
    """Return the name of the library with which llama.cpp computes. It ends with the CPU that it is for."""
    words = ("-npp", "1", "-ntg", "1", "-npl", "1", "-c", "64", "--verbose")
    run = subprocess.run((*command, *words), check=True, capture_output=True, text=True)  # noqa: S603
    found = re.search(r"loaded CPU backend from \S*/(\S+)\.so", run.stdout + run.stderr)
    return found[1] if found else "unknown"
