"""The C kernels in an emulator, for the instruction sets that a machine may lack. Needs Debian's packages qemu-user,
gcc-aarch64-linux-gnu and libc6-dev-arm64-cross."""

from __future__ import annotations

import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from kernels.native import build

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support" / "kernels"
PROGRAM = SUPPORT / "check_kernels.c"
FLAGS = ("-O1", "-std=gnu11", "-Wall", "-Wextra", "-Werror", f"-I{build.SOURCES}")
# The compiler of each architecture and its emulator.
ARCHITECTURES = {
    "aarch64": ("aarch64-linux-gnu-gcc", ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")),
    "x86_64": ("gcc", ("qemu-x86_64",)),
}
# CPUs of the emulators, and the variants that they can run, the fastest first. The first CPU of an emulator has all of
# its features. None has AVX-512.
CPUS = [
    ("aarch64", "max", ["neon+i8mm+bf16", "neon+dotprod", "neon"]),
    ("aarch64", "neoverse-n1", ["neon+dotprod", "neon"]),
    ("aarch64", "cortex-a72", ["neon"]),
    ("x86_64", "max", ["avx2", "generic"]),
    ("x86_64", "Nehalem", ["generic"]),
]
CASES = [case for case in CPUS if case[0] in ("aarch64", platform.machine())]


@cache
def compile_program(machine: str, place: Path) -> Path:
    command = ARCHITECTURES[machine][0] if machine != platform.machine() else "gcc"
    assert shutil.which(command), f"the test needs {command}"
    variants = next(variants for name, _, variants in CPUS if name == machine)
    library = build.compile_library(build.Compiler((command,), ""), place, variants=variants, machine=machine)
    program = place / "check"
    link = (f"-Wl,-rpath,{place}", str(library), "-lm", "-o", str(program))
    subprocess.run([command, *FLAGS, str(PROGRAM), *link], check=True)
    return program


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {machine: tmp_path_factory.mktemp(machine) for machine in ARCHITECTURES}


@pytest.mark.parametrize(("machine", "cpu", "variants"), CASES, ids=[f"{machine}-{cpu}" for machine, cpu, _ in CASES])
def test_the_fastest_variant_of_a_cpu_equals_plain_loops(
    machine: str, cpu: str, variants: list[str], places: dict[str, Path]
) -> None:
    emulator = ARCHITECTURES[machine][1]
    assert shutil.which(emulator[0]), f"the test needs {emulator[0]}"
    command = [*emulator, "-cpu", cpu, str(compile_program(machine, places[machine])), *build._VARIANTS[machine]]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = [f"checked {variants[0]}", *(f"can run {name}" for name in variants[1:])]
    assert result.stdout.splitlines() == lines, result.stdout + result.stderr
    assert result.returncode == 0


@pytest.mark.parametrize(
    ("header", "flags"),
    [
        ("tiles.h", ("-DVARIANT_AMX",)),
        pytest.param(
            "vnni.h", ("-mavx2", "-mfma"), marks=pytest.mark.skipif(platform.machine() != "x86_64", reason="x86 only")
        ),
    ],
)
def test_instructions_in_c_equal_plain_loops(header: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    """No emulator has AMX or AVX-VNNI. The code that uses them runs with these instructions in C."""
    program = tmp_path / "check"
    defines = ("-DVARIANT=generic", "-DVARIANTS=V(generic)", '-DNAME="generic"', f"-I{SUPPORT}")
    flags = (*flags, "-include", str(SUPPORT / header))
    sources = [str(path) for path in sorted(build.SOURCES.rglob("*.c"))]
    command = ["gcc", *FLAGS, *defines, *flags, *sources, str(PROGRAM), "-pthread", "-lm", "-o", str(program)]
    subprocess.run([*command, "-Wno-unused-variable", "-Wno-unused-function"], check=True)
    emulator = ("qemu-x86_64", "-cpu", "max") if header == "vnni.h" else ()
    result = subprocess.run(
        [*emulator, str(program)],
        env={"TEST_CPU": " avx fma avx2 avx_vnni "}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (result.stdout, result.returncode) == ("checked generic\n", 0), result.stderr
