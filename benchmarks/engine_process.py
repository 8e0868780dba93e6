"""The engine in a process of its own, so that variables of the environment limit its instruction sets.

    python -m benchmarks.engine_process MODEL_DIRECTORY '{"quantization": "int8"}'

The options are those of `EngineConfig`. The first line of the output says what the engine computes with. Then each line
of the input is a JSON object: `prompts`, lists of token ids that run concurrently, and `output`, the tokens of each
completion. Each line of the output has the figures of `benchmarks.engine.run`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from benchmarks.engine import run
from inference_worker.contract.engine_config import EngineConfig
from inference_worker.engine.engine import LLMEngine


def main() -> None:
    directory, options = sys.argv[1:]
    defaults = {"device": "cpu", "measure_peaks": False, "cpu_kernels": os.environ.get("MILLRACE_CPU_KERNELS", "auto")}
    config = EngineConfig(Path(directory), **(defaults | json.loads(options)))
    engine = LLMEngine(config)
    print(json.dumps(engine.computes_with), flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        print(json.dumps(run(engine, work["prompts"], work["output"])), flush=True)


if __name__ == "__main__":
    main()
