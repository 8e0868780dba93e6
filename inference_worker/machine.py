"""The machine that a worker would compute on, as a line of JSON. `millrace models inspect` runs this module.

python -m inference_worker.machine '{"dtype": "auto", "device": "auto", "checkpoint_dtype": "bfloat16"}'
"""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from inference_worker.contract import env
from inference_worker.contract.engine_config import CpuKernelsName, DeviceName, DTypeName, EngineConfig
from inference_worker.contract.settings import WorkerSettings
from inference_worker.engine.capacity.fit import ComputeDevice
from inference_worker.engine.capacity.peaks import measure_peaks
from inference_worker.engine.compute_path import choose_path
from inference_worker.engine.device import free_memory

_CPUINFO = Path("/proc/cpuinfo")


def measure_machine(dtype: DTypeName, device: DeviceName, checkpoint_dtype: str) -> ComputeDevice:
    """Return the device that a worker would use, its free memory, and its peak rates, measured now.

    Raises:
        ValueError: the device is not available, or the machine does not support the dtype.
    """
    kernels: CpuKernelsName = env.read_one(os.environ, WorkerSettings, "cpu_kernels")
    path = choose_path(EngineConfig(Path(), device, dtype, cpu_kernels=kernels), checkpoint=checkpoint_dtype)
    free_bytes = free_memory(path.device)  # before the measurement takes some
    name = torch.cuda.get_device_name(path.device) if path.device.type == "cuda" else _cpu_name()
    peaks = measure_peaks(path.device, path.dtype)
    return ComputeDevice(path.device.type, name, free_bytes, path.dtype_name, peaks)


def _cpu_name() -> str:
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def main() -> int:
    """Print the machine, and return the exit status."""
    try:
        print(json.dumps(asdict(measure_machine(**json.loads(sys.argv[1])))))  # noqa: T201  (the output)
    except ValueError as exc:
        print(exc, file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
