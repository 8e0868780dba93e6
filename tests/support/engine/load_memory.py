"""The memory of loads of models, measured in this process: `python -m tests.support.engine.load_memory CASES`.

CASES is a JSON list of [source, quantization, data directory]. The output is a JSON list with a load of each. The first
one is repeated, and only the second time is reported, since a process's first load also initializes libraries.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.contract.engine_config import EngineConfig, QuantizationName
from inference_worker.contract.process_memory import reuse_freed_memory, trim_heap
from inference_worker.contract.settings import ModelSpec
from inference_worker.engine.engine import LLMEngine

KV_BYTES = 64 << 20  # never written by a load, so they take no memory
_STATUS = Path("/proc/self/status")


class LoadMemory(NamedTuple):
    """Anonymous bytes of a load, less those before it."""

    conversion_peak: int
    peak: int
    rest: int


def read_anonymous() -> int:
    """Return the bytes of this process that no file backs."""
    lines = _STATUS.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


class _Peak:
    """The maximum of the anonymous bytes during a context, read every millisecond."""

    def __enter__(self) -> _Peak:
        self.num_bytes = read_anonymous()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._ended.wait(0.001):
            self.num_bytes = max(self.num_bytes, read_anonymous())


def measure(source: str, quantization: QuantizationName, data_dir: Path) -> LoadMemory:
    """Load the model `source`, free it, and return the memory that it took."""
    trim_heap()
    before = read_anonymous()
    with _Peak() as conversion:
        directory = ensure_model(ModelSpec("model", source, "auto", quantization=quantization), data_dir)
    with _Peak() as load:
        config = EngineConfig(
            directory, device="cpu", dtype="bfloat16", threads=1, quantization=quantization, max_model_len=64,
            kv_cache_memory=KV_BYTES, measure_peaks=False,
        )  # fmt: skip
        engine = LLMEngine(config)
    rest = read_anonymous()
    del engine
    gc.collect()
    return LoadMemory(conversion.num_bytes - before, load.num_bytes - before, rest - before)


def main() -> None:
    cases: list[Any] = json.loads(sys.argv[1])
    reuse_freed_memory()
    results = [measure(source, quantization, Path(data)) for source, quantization, data in (cases[0], *cases)]
    sys.stdout.write(json.dumps(results[1:]) + "\n")


if __name__ == "__main__":
    main()
