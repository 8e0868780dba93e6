"""The choice of the C kernels' variant on each class of CPU."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from inference_worker.contract.engine_config import CpuKernelsName
from kernels.native import build

SUPPORT = Path(__file__).resolve().parents[2] / "support" / "kernels"
AVX2 = "avx fma avx2"
AVX512 = f"{AVX2} avx512f avx512dq avx512cd avx512bw avx512vl"
# The features of CPUs, as /proc/cpuinfo names them, and the variants that they can run.
CPUS = {
    "Nehalem": ("x86_64", "sse4_2", ["generic"]),
    "Sandy Bridge": ("x86_64", "avx", ["generic"]),
    "Haswell and Zen 1 to 3": ("x86_64", AVX2, ["avx2", "generic"]),
    "Alder Lake": ("x86_64", f"{AVX2} avx_vnni", ["avx2+vnni", "avx2", "generic"]),
    "Knights Landing": ("x86_64", f"{AVX2} avx512f avx512cd", ["avx2", "generic"]),
    "Skylake": ("x86_64", AVX512, ["avx512", "avx2", "generic"]),
    "Cascade Lake and Ice Lake": (
        "x86_64",
        f"{AVX512} avx512_vnni",
        ["avx512+vnni", "avx512", "avx2", "generic"],
    ),
    "Cooper Lake and Zen 4": (
        "x86_64",
        f"{AVX512} avx512_bf16 avx512_vnni",
        ["avx512+bf16", "avx512+vnni", "avx512", "avx2", "generic"],
    ),
    "Sapphire Rapids": (
        "x86_64",
        f"{AVX512} avx_vnni avx512_bf16 avx512_vnni amx_bf16 amx_tile amx_int8",
        ["amx", "avx512+bf16", "avx512+vnni", "avx512", "avx2+vnni", "avx2", "generic"],
    ),
    "Cortex-A72": ("aarch64", "fp asimd aes", ["neon"]),
    "Neoverse N1 and Apple M1": ("aarch64", "fp asimd aes asimddp", ["neon+dotprod", "neon"]),
    "i8mm without bf16": ("aarch64", "fp asimd asimddp i8mm", ["neon+dotprod", "neon"]),
    "Neoverse V1 and Apple M2": (
        "aarch64",
        "fp asimd asimddp i8mm bf16",
        ["neon+i8mm+bf16", "neon+dotprod", "neon"],
    ),
}
X86_CPUS = [name for name, (machine, _, _) in CPUS.items() if machine == "x86_64"]
CHOOSE = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.millrace_chosen.restype = ctypes.c_char_p
assert library.millrace_choose(b"") == 0
print(library.millrace_chosen().decode())
print(*(name for name in sys.argv[2:] if library.millrace_choose(name.encode()) == 0))
"""


@pytest.mark.parametrize("cpu", CPUS)
def test_a_build_has_the_variants_of_the_cpu(cpu: str) -> None:
    machine, features, variants = CPUS[cpu]
    assert build.match_variants(machine, features.split()) == variants


def test_the_setting_takes_each_variant() -> None:
    variants = [name for machine in build._VARIANTS.values() for name in machine]
    assert get_args(CpuKernelsName) == ("auto", "pytorch", *variants)


@pytest.fixture(scope="module")
def library() -> Path:
    """The library with a processor whose features are in the environment."""
    flags = ("-O0", f"-I{SUPPORT}", f"-DHEADER=0x{hashlib.sha256((SUPPORT / 'cpuid.h').read_bytes()).hexdigest()[:8]}")
    return build.build_library(build.find_compilers()[0], build.cache_directory(), flags)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="tests/emulation has the CPUs of other architectures")
@pytest.mark.parametrize("cpu", X86_CPUS)
def test_the_library_chooses_the_fastest_variant_of_the_cpu(cpu: str, library: Path) -> None:
    _, features, variants = CPUS[cpu]
    command = [sys.executable, "-c", CHOOSE, str(library), *build._VARIANTS["x86_64"]]
    found = subprocess.run(command, env={"TEST_CPU": f" {features} "}, check=True, capture_output=True, text=True)
    assert found.stdout.split() == [variants[0], *variants]
