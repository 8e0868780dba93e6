"""The C kernels in an emulator, for the instruction sets that a machine may lack. Needs Debian's packages qemu-user,
gcc-aarch64-linux-gnu and libc6-dev-arm64-cross."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.native import build

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support" / "kernels"
PROGRAM = SUPPORT / "check_kernels.c"
FLAGS = ("-O1", "-std=gnu11", "-Wall", "-Wextra", "-Werror", f"-I{build.SOURCES}")
# The compiler of each architecture, its emulator, and the instruction sets that the emulator has. It has no AVX-512.
ARCHITECTURES = {
    "aarch64": ("aarch64-linux-gnu-gcc", ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"), ["generic"]),
    "x86_64": ("gcc", ("qemu-x86_64", "-cpu", "max"), ["avx2", "generic"]),
}
CASES = [
    (machine, sets) for machine, (_, _, sets) in ARCHITECTURES.items() if machine in ("aarch64", platform.machine())
]


def compile_program(machine: str, place: Path) -> Path:
    command = ARCHITECTURES[machine][0] if machine != platform.machine() else "gcc"
    assert shutil.which(command), f"the test needs {command}"
    library = build.compile_library(build.Compiler((command,), ""), place, machine=machine)
    program = place / "check"
    link = (f"-Wl,-rpath,{place}", str(library), "-lm", "-o", str(program))
    subprocess.run([command, *FLAGS, str(PROGRAM), *link], check=True)
    return program


@pytest.mark.parametrize(("machine", "sets"), CASES, ids=[machine for machine, _ in CASES])
def test_operators_equal_plain_loops(machine: str, sets: list[str], tmp_path: Path) -> None:
    emulator = ARCHITECTURES[machine][1]
    assert shutil.which(emulator[0]), f"the test needs {emulator[0]}"
    command = [*emulator, str(compile_program(machine, tmp_path))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.stdout.splitlines() == [f"checked {name}" for name in sets], result.stdout + result.stderr
    assert result.returncode == 0


def test_tiles_of_amx_equal_plain_loops(tmp_path: Path) -> None:
    """No emulator has AMX. The generic code with AMX's tiles runs with its instructions in C, which check their use."""
    program = tmp_path / "check"
    tiles = (
        "-DVARIANT=generic",
        "-DHAVE_GENERIC",
        '-DNAME="generic"',
        "-DVARIANT_AMX",
        "-include",
        str(SUPPORT / "tiles.h"),
    )
    sources = [str(path) for path in sorted(build.SOURCES.glob("*.c"))]
    command = ["gcc", *FLAGS, *tiles, *sources, str(PROGRAM), "-pthread", "-lm", "-o", str(program)]
    subprocess.run([*command, "-Wno-unused-variable"], check=True)
    result = subprocess.run([str(program)], capture_output=True, text=True, timeout=300, check=False)
    assert (result.stdout, result.returncode) == ("checked generic\n", 0), result.stderr
