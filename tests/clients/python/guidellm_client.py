"""guidellm, which measures a server under load."""

import asyncio
import json
import os
from pathlib import Path

os.environ["GUIDELLM__MAX_WORKER_PROCESSES"] = "1"

from features import *
from guidellm.entrypoints import benchmark_generative_text
from guidellm.schemas.benchmark import BenchmarkScenario

NUM_REQUESTS = 3


def benchmark(path, **options):
    """Run a benchmark of `path`, and check that each request was completed with its tokens."""
    report = Path("report.json").absolute()
    report.unlink(missing_ok=True)
    backend = {"target": URL, "model": MODEL, "api_key": KEY, "request_format": path, "max_tokens": 8}
    spec = {
        "backend": {"kind": "openai_http", "validate_backend": False, **backend, **options},
        "profile": {"kind": "synchronous"},
        "constraints": [{"kind": "max_requests", "count": NUM_REQUESTS}],
        "data": [{"kind": "in_memory_dict_list", "data": [{"prompt": HELLO}] * NUM_REQUESTS}],
        "outputs": [{"kind": "json", "path": str(report)}],
    }
    args = BenchmarkScenario.create(None, spec=spec)
    asyncio.run(benchmark_generative_text(args=args, progress=False, console=None))
    (measured,) = json.loads(report.read_text())["benchmarks"]
    completed = measured["requests"]["successful"]
    counts = [each["output_metrics"]["text_tokens"] for each in completed]
    assert len(counts) == NUM_REQUESTS
    assert all(1 <= count <= 8 for count in counts), counts  # the server's usage; a sampled answer may end earlier
    assert all(each["input_metrics"]["text_tokens"] > 5 for each in completed)


def plain():
    benchmark("/v1/chat/completions", stream=False)


def stream():
    benchmark("/v1/chat/completions")


if __name__ == "__main__":  # its worker processes import this module
    run({"plain": plain, "stream": stream})
