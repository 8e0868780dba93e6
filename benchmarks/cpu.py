"""The CPU backend beside the engines that a user could choose instead: OpenVINO GenAI, llama.cpp and vLLM for CPUs.

    make bench-cpu
    python -m benchmarks.cpu --peers build/peers --out benchmarks/results

Sections: `engine` compares the engine in a process with OpenVINO's continuous batching and llama.cpp, with all
instruction sets of the machine and with AVX2 alone. `served` compares the platform with the servers of vLLM and
llama.cpp, by throughput and latencies. `prefill` has prompts of 1,024 tokens, and `shared` prompts of 640 tokens of
which 512 are the same. `bundled` measures the platform through its API as a user has it, speculation included, with all
instruction sets and with AVX2 alone. `platform` measures the CPU time of each token outside the engine, with an engine
that computes nothing and without PostgreSQL, which takes no part in a token.

All systems of a section are measured in turn in each round, on all cores, with SmolLM2-135M, greedy decoding and the
end token ignored. A system is measured when the processes of the others are at rest, at the latest after a minute.
`busy_rounds` is the number of rounds that began on a busy machine. Millrace has its default options and those of int8
and int4; a row of its own has the products of PyTorch. The platform's speculation is off: without an end, outputs
repeat themselves, so drafts from them would be right more often than in real answers. Figures are medians. Peers that
are not installed are left out; `--install` installs them.

With `--out`, a run adds its rows to the results of the same day and machine. Rows that it measures again are replaced
together with those of the peers, so that all rows of a load come from one run. Therefore long sections can be split:

    python -m benchmarks.cpu --out benchmarks/results --sections served --streams 32
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform as machine
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode

from benchmarks import gateway, serve
from benchmarks.cpu_engines import INSTRUCTION_SETS, TYPES, EngineUnderTest, start_engines
from benchmarks.gateway_load import many_streams
from benchmarks.models import bundled_model
from benchmarks.options import parse
from benchmarks.rest import LIMIT_SECONDS, Rest
from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.contract.settings import ModelSpec
from kernels.native.library import load_library
from millrace.local.program import Program, free_port

ROOT = Path(__file__).resolve().parents[1]

SECTIONS = ("engine", "served", "prefill", "shared", "bundled", "platform")
PEERS = Path(__file__).parent / "peers"
EMBEDDED = ModelSpec("smollm2-135m", "embedded", "auto")
CPU_FLAGS = ("amx_int8", "amx_bf16", "avx512_bf16", "avx512_vnni", "avx512f", "avx_vnni", "avx2", "asimd")
LONG_PROMPT = 1024
Rows = list[dict[str, Any]]


def main() -> int:
    options = parse_arguments()
    sections = options.sections.split(",")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the servers
    report: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": describe_machine()}
    rest = Rest(0 if options.quick else LIMIT_SECONDS)
    with ExitStack() as running:
        model = ensure_model(EMBEDDED, options.models) if options.models else bundled_model()
        if options.install:
            command = (sys.executable, str(PEERS / "install.py"), str(options.peers), str(model))
            subprocess.run(command, check=True)  # noqa: S603  (our own script)
        print(json.dumps(report["machine"]), flush=True)
        if "engine" in sections:
            report["engine"] = measure_engines(options, model, rest)
            save(report, options.out)
        if {"served", "prefill", "shared"} & {*sections}:
            servers = [
                *running.enter_context(millrace(options.speculation)),
                *running.enter_context(vllm(options, model)),
                *running.enter_context(llama_cpp(options)),
            ]
            for section, loads in served_loads(options).items():
                if section in sections:
                    report[section] = [row for load in loads for row in measure_served(servers, load, rest)]
                    save(report, options.out)
            running.close()
        if "bundled" in sections:
            report["bundled"] = measure_bundled(options, rest)
            save(report, options.out)
        if "platform" in sections:
            report["platform"] = measure_platform(options)
            save(report, options.out)
    print("\n".join(f"{name}: {value:.2f}" for name, value in ratios(report).items()))
    return int(any(row.get("errors") for section in SECTIONS for row in report.get(section, [])))


def save(report: dict[str, Any], directory: Path | None) -> None:
    """Add the report to the results of its day."""
    if directory is None:
        return
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{report['date'][:10]}-{report['machine']['slug']}.json"
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(merge(earlier, report), indent=1) + "\n", encoding="utf-8")
    print(path)


def merge(earlier: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """Return the report with the rows of an earlier one for the loads that it did not measure."""

    def load(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in ("streams", "input", "shared_prefix", "instruction_sets"))

    merged = dict(report)
    for section in SECTIONS:
        rows = report.get(section, [])
        measured = {load(row) for row in rows}
        kept = [row for row in earlier.get(section, []) if load(row) not in measured]
        if kept or rows:
            merged[section] = sorted(kept + rows, key=lambda row: row["streams"])
    return merged | {"ratios": ratios(merged)}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=ROOT / "build" / "peers", help="default build/peers")
    parser.add_argument("--install", action="store_true", help="install the peers first")
    parser.add_argument(
        "--models", type=Path, help="a directory that keeps the converted model (default: the checkout's)"
    )
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"default {','.join(SECTIONS)}")
    parser.add_argument("--streams", type=serve.numbers, default=[1, 8, 32], help="default 1,8,32; prefill: without 32")
    parser.add_argument(
        "--instruction-sets", type=lambda text: text.split(","), default=list(INSTRUCTION_SETS),
        help=f"of the sections engine and bundled (default {','.join(INSTRUCTION_SETS)})",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--input", type=int, default=128, help="tokens of a prompt (default 128)")
    parser.add_argument("--output", type=int, default=128, help="tokens of a completion (default 128)")
    parser.add_argument(
        "--speculation", default="off", choices=("auto", "off"), help="of the platform (default off; bundled: auto)"
    )
    parser.add_argument("--out", type=Path, help="a directory for the results (default: none)")
    return parse(
        parser,
        {"sections": "engine", "streams": [1], "rounds": 1, "input": 8, "output": 4, "instruction_sets": ["all"]},
    )


def describe_machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = {*fields.get("flags", fields.get("Features", "")).split()}
    library = load_library()
    name = fields.get("model name", machine.machine())
    return {
        "cpu": name,
        "family": f"{fields.get('cpu family', '')}/{fields.get('model', '')}",
        "slug": "-".join(name.lower().split()[:2]) + f"-{fields.get('model', '')}",
        "cores": len(os.sched_getaffinity(0)),
        "instruction_sets": [flag for flag in CPU_FLAGS if flag in flags],
        "kernels": library.variant if library else "pytorch",
        "load": os.getloadavg()[0],  # of other work, before the measurement
    }


# The engines in processes of their own


def measure_engines(options: argparse.Namespace, model: Path, rest: Rest) -> Rows:
    """Measure the engines in turn, for each choice of instruction sets. Rates include the prefill."""
    loads = [(streams, options.input, options.output) for streams in options.streams]
    if not options.quick:
        loads += [(streams, LONG_PROMPT, 8) for streams in options.streams if streams <= 8]
    rows: Rows = []
    for instruction_sets in options.instruction_sets:
        with ExitStack() as running:
            engines = list(start_engines(options.peers, model, instruction_sets, running))
            for engine in engines:
                print(f"{engine.system}, {engine.type}, {instruction_sets}: {engine.computes_with}", flush=True)
            for streams, length, output in loads:
                for row in measure_load(engines, [length] * streams, output, options.rounds, rest):
                    rows.append(row | {"input": length, "instruction_sets": instruction_sets})
                    print(rows[-1], flush=True)
    return rows


def measure_load(
    engines: Sequence[EngineUnderTest], lengths: Sequence[int], output: int, rounds: int, rest: Rest
) -> Rows:
    """Measure the engines in turn with prompts of these lengths. The first round is not counted."""
    draw = random.Random(len(lengths))  # noqa: S311
    results: list[list[dict[str, float]]] = [[] for _ in engines]
    busy = [0] * len(engines)
    for round_ in range(rounds + 1):
        prompts = [[draw.randrange(1000, 40_000) for _ in range(length)] for length in lengths]
        for index, engine in enumerate(engines):
            is_at_rest = rest.wait()
            result = engine.run(prompts, output)
            if round_:
                results[index].append(result)
                busy[index] += not is_at_rest
    return [
        {
            "system": engine.system,
            "type": engine.type,
            "computes_with": engine.computes_with,
            "streams": len(lengths),
            "tokens_per_second": statistics.median(r["tokens"] / r["seconds"] for r in own),
            "first_token_ms": 1e3 * statistics.median(r["first"] for r in own),
            "rounds": [round(r["tokens"] / r["seconds"], 1) for r in own],
            "busy_rounds": busy[index],
        }
        for index, (engine, own) in enumerate(zip(engines, results, strict=True))
    ]


# Served


def served_loads(options: argparse.Namespace) -> dict[str, list[argparse.Namespace]]:
    """Return the loads of each section, as the options of `benchmarks.serve`."""

    def load(**values: Any) -> argparse.Namespace:
        defaults = {"requests": 2, "rounds": options.rounds, "shared_prefix": 0, "output": options.output}
        defaults |= {"input": options.input, "streams": options.streams} | values
        return argparse.Namespace(**defaults, seed=defaults["input"] + defaults["shared_prefix"])  # no common prompts

    return {
        "served": [load()],
        "prefill": [load(input=1024, output=8, streams=[n for n in options.streams if n <= 8])],
        "shared": [load(input=640, streams=[8], shared_prefix=shared) for shared in (512, 0)],
    }


def measure_served(servers: Sequence[serve.ServerUnderTest], load: argparse.Namespace, rest: Rest) -> Rows:
    load.servers = list(servers)
    rows = serve.measure(load, rest)
    print(serve.table(rows, [server.name for server in servers]), flush=True)
    return [row | {"input": load.input, "shared_prefix": load.shared_prefix} for row in rows]


def measure_bundled(options: argparse.Namespace, rest: Rest) -> Rows:
    """Measure the platform as a user has it, for each choice of instruction sets."""
    rows: Rows = []
    (load,) = served_loads(options)["served"]
    for instruction_sets in options.instruction_sets:
        with millrace("auto", INSTRUCTION_SETS[instruction_sets]) as servers:
            rows += [row | {"instruction_sets": instruction_sets} for row in measure_served(servers, load, rest)]
    return rows


@contextmanager
def millrace(
    speculation: str, variables: Mapping[str, str] = MappingProxyType({})
) -> Iterator[list[serve.ServerUnderTest]]:
    """Run the platform with one deployment for each type of weights.

    Args:
        speculation: of each deployment.
        variables: further variables of the environment.
    """
    with ExitStack() as running:
        state = Path(tempfile.mkdtemp(prefix="millrace-cpu-"))
        running.callback(shutil.rmtree, state, ignore_errors=True)
        state.chmod(0o711)
        port = free_port()
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("MILLRACE_", "DJANGO_"))}
        models = ",".join(
            f"{name}=embedded?{urlencode({'speculation': speculation} | kind.options)}" for name, kind in TYPES.items()
        )
        environ |= {
            "MILLRACE_DATA_DIR": str(state), "MILLRACE_PORT": str(port), "MILLRACE_MODELS": models,
            "MILLRACE_LOG_LEVEL": "warning", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "platform")]),
        } | variables  # fmt: skip
        url = f"http://127.0.0.1:{port}/v1"
        credentials = state / "credentials.json"
        command = (sys.executable, "-m", "millrace.cli", "up")

        def is_ready() -> bool:
            if not credentials.exists():
                return False
            key = json.loads(credentials.read_text(encoding="utf-8"))["demo_key"]
            return all(completes(url, name, key) for name in TYPES)

        program = Program("up", command, environ=environ, cwd=ROOT, ready=is_ready, ready_seconds=300, stop_seconds=60)
        gateway.start(program, state, running)
        key = json.loads(credentials.read_text(encoding="utf-8"))["demo_key"]
        yield [serve.ServerUnderTest(f"millrace-{name}", url, name, key) for name in TYPES]


@contextmanager
def vllm(options: argparse.Namespace, model: Path) -> Iterator[list[serve.ServerUnderTest]]:
    """Run vLLM's server; no server if it is not installed."""
    script = options.peers / "vllm" / "bin" / "vllm"
    if not script.exists():
        print(f"Without vLLM: {options.peers} does not contain it; --install installs it.")
        yield []
        return
    with ExitStack() as running:
        state = Path(running.enter_context(tempfile.TemporaryDirectory()))
        port, cores = free_port(), sorted(os.sched_getaffinity(0))
        words = ("--served-model-name", "vllm", "--dtype", "bfloat16", "--max-model-len", "2048")
        environ = {
            **os.environ, "VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "PATH": f"{script.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }  # fmt: skip
        environ.pop("PYTHONPATH", None)
        url = f"http://127.0.0.1:{port}/v1"
        ready = partial(completes, url, "vllm", "none")
        argv = (str(script), "serve", str(model), "--port", str(port), *words, "--max-num-seqs", "64")
        program = Program("vllm", argv, environ=environ, ready=ready, ready_seconds=1800, stop_seconds=30)
        gateway.start(program, state, running)
        yield [serve.ServerUnderTest("vllm", url, "vllm", "none")]


@contextmanager
def llama_cpp(options: argparse.Namespace) -> Iterator[list[serve.ServerUnderTest]]:
    """Run llama.cpp's server with the 16-bit model; no server if it is not installed."""
    script, model = options.peers / "llama.cpp-all" / "llama-server", options.peers / "f16.gguf"
    if not script.exists() or not model.exists():
        print(f"Without llama.cpp: {options.peers} does not contain it; --install installs it.")
        yield []
        return
    with ExitStack() as running:
        state = Path(running.enter_context(tempfile.TemporaryDirectory()))
        port, streams = free_port(), max(options.streams)
        url = f"http://127.0.0.1:{port}/v1"
        words = ("-np", str(streams), "-c", str(streams * 2048), "-t", str(len(os.sched_getaffinity(0))))
        argv = (str(script), "-m", str(model), "--port", str(port), *words)
        ready = partial(completes, url, "llama.cpp", "none")
        program = Program("llama.cpp", argv, environ=dict(os.environ), ready=ready, ready_seconds=300, stop_seconds=30)
        gateway.start(program, state, running)
        yield [serve.ServerUnderTest("llama.cpp", url, "llama.cpp", "none")]


def completes(url: str, model: str, key: str) -> bool:
    """Return whether the server completes a prompt."""
    sample = serve.Sample()
    prompts = serve.Prompts(argparse.Namespace(seed=0, shared_prefix=0, input=4))
    try:
        sample = serve.load(serve.ServerUnderTest("", url, model, key), 1, 1, prompts, 2)
    except ValueError:  # not the server's own response
        return False
    if sample.errors or not sample.output_tokens:
        time.sleep(0.5)
        return False
    return True


# The platform


def measure_platform(options: argparse.Namespace) -> Rows:
    """Measure the CPU time of each token outside the engine."""
    rows: Rows = []
    with gateway.platform(pace=20.0) as (endpoint, processes):
        request = endpoint.request(stream=True, max_tokens=200)
        asyncio.run(many_streams(endpoint.url, endpoint.request(stream=True, max_tokens=20), 4, 20, 0, 30))
        for streams in options.streams:
            before = gateway.cpu_times(processes)
            result = asyncio.run(many_streams(endpoint.url, request, streams, 200, 0, 60))
            after = gateway.cpu_times(processes)
            costs = {name: 1e6 * (after[name] - before[name]) / max(1, result.received) for name in after}
            rows.append({"streams": streams, "cpu_us_per_token": sum(costs.values()), **costs, "errors": result.errors})
            print(rows[-1], flush=True)
    return rows


def ratios(report: dict[str, Any]) -> dict[str, float]:
    """Return the figures of Millrace relative to those of the peers."""
    found: dict[str, float] = {}
    loads: dict[tuple[Any, ...], dict[tuple[str, str], dict[str, Any]]] = {}
    for row in report.get("engine", []):
        load = (row.get("instruction_sets"), row["streams"], row.get("input"))
        loads.setdefault(load, {})[row["system"], row["type"]] = row
    for (instruction_sets, streams, length), rows_of in loads.items():
        for name in TYPES:
            own = rows_of.get(("millrace", name))
            # A user may also take the peer's next larger type, if that is faster.
            peers = [
                row for (system, kind), row in rows_of.items() if system != "millrace" and kind in (name, "default")
            ]
            if own is None or not peers:
                continue
            if length == LONG_PROMPT:
                key, best = "first_token_ms", min(row["first_token_ms"] for row in peers)
            else:
                key, best = "tokens_per_second", max(row["tokens_per_second"] for row in peers)
            found[
                f"engine, {instruction_sets}, {name}, {streams} streams, {length} in: {key} relative to the best peer"
            ] = own[key] / best
    for section, key in (("served", "tokens_per_second"), ("prefill", "ttft_p50_ms"), ("shared", "ttft_p50_ms")):
        rows = {(row["server"], row["streams"], row["shared_prefix"]): row for row in report.get(section, [])}
        for (server, streams, shared), row in rows.items():
            peer = rows.get(("vllm", streams, shared))
            if peer and server != "vllm":
                found[f"{section}, {server}, {streams} streams, {shared} shared: {key} relative to vLLM"] = (
                    row[key] / peer[key]
                )
            if shared and (server, streams, 0) in rows:
                found[f"{section}, {server}: {key} relative to no shared prefix"] = (
                    row[key] / rows[server, streams, 0][key]
                )
    return found


if __name__ == "__main__":
    sys.exit(main())
