"""The resident memory of an engine in this process, by part, after the load and during mixed requests.

    python -m benchmarks.memory [--requests 1000] [--kv-mib 256]

Prompts have 5 to 119 tokens and outputs 1 to 15. Half of the requests are greedy. Eight run concurrently.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.options import parse
from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.contract.engine_config import EngineConfig
from inference_worker.contract.process_memory import release_code, reuse_freed_memory, trim_heap
from inference_worker.contract.request import Request, SamplingParams
from inference_worker.contract.settings import ModelSpec
from inference_worker.engine.engine import LLMEngine

CONCURRENT = 8
REPORTS = 4
_HEADER = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)")


def resident_parts() -> dict[str, float]:
    """Return the resident MiB of this process: weights of mapped files, other files, the heap, and other memory."""
    parts = Counter[str]()
    kind = ""
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if header := _HEADER.fullmatch(line):
            name = header[1]
            is_checkpoint = name.endswith(".safetensors")
            kind = "heap" if name == "[heap]" else "checkpoint" if is_checkpoint else "files" if name else "anonymous"
        elif line.startswith("Rss:"):
            parts[kind] += int(line.split()[1])
    return {name: parts[name] / 1024 for name in ("anonymous", "heap", "files", "checkpoint")}


def report(label: str) -> None:
    parts = resident_parts()
    cells = (f"{value:>10.0f}" for value in (*parts.values(), sum(parts.values())))
    print(f"{label:<16}", *cells, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="default 1000")
    parser.add_argument("--kv-mib", type=int, default=256, help="MiB of the KV cache (default 256)")
    parser.add_argument("--threads", type=int, default=0, help="0: one for each core (default)")
    options = parse(parser, {"requests": 8, "kv_mib": 190, "threads": 1})
    reuse_freed_memory()
    print(f"{'MiB':<16}", *(f"{name:>10}" for name in (*resident_parts(), "total")))
    report("imports")
    with tempfile.TemporaryDirectory() as place:
        directory = ensure_model(ModelSpec("smollm2-135m", "embedded", "auto"), Path(place))
        engine = LLMEngine(
            EngineConfig(
                directory, device="cpu", dtype="bfloat16", threads=options.threads, measure_peaks=False,
                kv_cache_memory=options.kv_mib << 20,
            )
        )  # fmt: skip
    trim_heap()
    release_code()
    report("load")
    draw = random.Random(1)  # noqa: S311
    added = ended = 0
    while ended < options.requests:
        while added < min(options.requests, ended + CONCURRENT):
            ids = [draw.randrange(1000, 40_000) for _ in range(draw.randrange(5, 120))]
            params = SamplingParams(max_tokens=draw.randrange(1, 16), temperature=added % 2, ignore_eos=True)
            engine.add_request(Request(f"r{added}", ids, params))
            added += 1
        before = ended
        ended += sum(output.finish_reason is not None for output in engine.step())
        if ended * REPORTS // options.requests > before * REPORTS // options.requests:
            report(f"{ended} requests")


if __name__ == "__main__":
    main()
