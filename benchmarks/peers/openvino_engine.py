"""OpenVINO GenAI's continuous batching as a process that measures on request. It runs in its own environment.

    openvino/bin/python benchmarks/peers/openvino_engine.py EXPORTED_MODEL THREADS

The first line of the output is a JSON string with the types that OpenVINO can compute with on this CPU. Each line of
the input is a JSON object: `prompts`, lists of token ids that run concurrently, and `output`, the tokens of each
completion. Each further line of the output has the seconds of the run, those to the first token of all prompts, and
the number of tokens.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any


def main() -> None:
    genai, openvino = importlib.import_module("openvino_genai"), importlib.import_module("openvino")
    directory, threads = sys.argv[1:]
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_batched_tokens = 4, 512
    scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = True, False
    properties = {"INFERENCE_NUM_THREADS": int(threads), "PERFORMANCE_HINT": "LATENCY"}
    pipeline = genai.ContinuousBatchingPipeline(directory, scheduler, "CPU", properties)
    capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    print(json.dumps(" ".join(capabilities)), flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        print(json.dumps(measure(genai, openvino, pipeline, work["prompts"], work["output"])), flush=True)


def measure(genai: Any, openvino: Any, pipeline: Any, prompts: list[list[int]], output: int) -> dict[str, float]:
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = output, True, False
    started, first = time.perf_counter(), 0.0
    handles = [
        pipeline.add_request(index, openvino.Tensor(numpy_row(ids)), config) for index, ids in enumerate(prompts)
    ]
    while pipeline.has_non_finished_requests():
        pipeline.step()
        if not first and all(handle.can_read() or _has_ended(genai, handle) for handle in handles):
            first = time.perf_counter() - started
    seconds = time.perf_counter() - started
    tokens = sum(len(result.generated_ids) for handle in handles for result in handle.read_all())
    return {"seconds": seconds, "first": first, "tokens": tokens}


def numpy_row(ids: list[int]) -> Any:
    numpy = importlib.import_module("numpy")
    return numpy.array([ids], dtype=numpy.int64)


def _has_ended(genai: Any, handle: Any) -> bool:
    return bool(handle.get_status() != genai.GenerationStatus.RUNNING)


if __name__ == "__main__":
    main()
