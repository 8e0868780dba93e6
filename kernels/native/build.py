"""The build of the C library: for a wheel, or at its first use in a cache directory of this user alone."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
PREBUILT = Path(__file__).parent / "prebuilt"  # the library that a wheel contains
BUILD_SECONDS = 300  # a build that is older was interrupted

_COMMON = ("-O3", "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_AVX512_BF16 = (*_AVX512, "-mavx512vnni", "-mavx512bf16")
# The flags of each variant, the fastest first. Only the files in `src/variant` may use more than the base instructions.
_VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "amx": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-DVARIANT_AMX"),
        "avx512+bf16": _AVX512_BF16,
        "avx512+vnni": (*_AVX512, "-mavx512vnni"),
        "avx512": _AVX512,
        "avx2+vnni": (*_AVX2, "-mavxvnni"),
        "avx2": _AVX2,
        "generic": (),
    },
    "aarch64": {
        "neon+i8mm+bf16": ("-march=armv8.2-a+dotprod+i8mm+bf16",),
        "neon+dotprod": ("-march=armv8.2-a+dotprod",),
        "neon": (),
    },
}
_CPUINFO_NAMES = {"dotprod": "asimddp"}  # names of flags in /proc/cpuinfo, if they differ


class BuildError(Exception):
    """An error: the library cannot be built or its cache directory is not private. The message contains the reason."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler: its command, and a text that changes with its version."""

    command: tuple[str, ...]
    version: str


def find_compilers() -> list[Compiler]:
    """Return the system's C compilers, then the one of the package `ziglang`. Each program occurs once."""
    found: dict[str, Compiler] = {}
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            _add(found, (path,), Path(path))
    spec = importlib.util.find_spec("ziglang")
    if spec is not None and spec.origin is not None:
        # Without a CPU model it uses all instructions of this machine.
        command = (sys.executable, "-m", "ziglang", "cc", "-mcpu=baseline")
        _add(found, command, Path(spec.origin).parent / "zig")
    return list(found.values())


def _add(found: dict[str, Compiler], command: tuple[str, ...], program: Path) -> None:
    with contextlib.suppress(OSError):  # the program was removed
        version = _file_version(program)
        found.setdefault(version, Compiler(command, version))


def _file_version(path: Path) -> str:
    real = path.resolve()
    status = real.stat()
    return f"{real}:{status.st_size}:{status.st_mtime_ns}"


def cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "millrace" / "kernels"


def prebuilt_path() -> Path:
    """Return the path at which a wheel for this architecture contains the library of these sources."""
    return PREBUILT / f"{platform.machine()}-{_digest_sources(platform.machine())}.so"


def build_for_wheel() -> Path:
    """Build the library with the first working compiler at `prebuilt_path`, and return it.

    Raises:
        BuildError: no compiler can build it with all instruction sets.
    """
    if not sys.platform.startswith("linux") or platform.machine() not in _VARIANTS:
        raise BuildError(f"{sys.platform} on {platform.machine()} is not supported")
    target, message = prebuilt_path(), "no C compiler is installed"
    for compiler in find_compilers():
        with tempfile.TemporaryDirectory() as place:
            try:
                library = compile_library(compiler, Path(place))
            except BuildError as exc:
                message = str(exc)
                continue
            shutil.rmtree(PREBUILT, ignore_errors=True)
            PREBUILT.mkdir()
            shutil.copyfile(library, target)
            return target
    raise BuildError(message)


def runnable_variants() -> list[str]:
    """Return the names of the instruction sets that this machine may run, the fastest first.

    The built library decides.
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return list(_VARIANTS.get(platform.machine(), {}))
    lines = (line.partition(":") for line in text.splitlines())
    features = next((value.split() for name, _, value in lines if name.strip() in ("flags", "Features")), [])
    return match_variants(platform.machine(), features)


def match_variants(machine: str, features: Sequence[str]) -> list[str]:
    """Return the variants of an architecture whose instructions a CPU has, the fastest first.

    Args:
        features: the names in /proc/cpuinfo.
    """
    found = {name.replace("_", "") for name in features}
    return [name for name, flags in _VARIANTS.get(machine, {}).items() if _required_features(flags) <= found]


def _required_features(flags: Sequence[str]) -> set[str]:
    """Return the names of /proc/cpuinfo, without `_`, for the instructions that the compiler's flags allow."""
    names: list[str] = []
    for flag in flags:
        if flag.startswith("-march="):
            names += flag.split("+")[1:]
        elif flag.startswith("-m"):
            names.append(flag.removeprefix("-m").replace("-", ""))
    return {_CPUINFO_NAMES.get(name, name) for name in names}


def build_for_machine(compiler: Compiler, variants: Sequence[str]) -> Path:
    """Return the library with the first variant that this machine and this compiler have, built once for a user.

    Raises:
        BuildError: the compiler can build none, or the cache directory is not private. RuntimeError: the user has none.
    """
    directory, message = cache_directory(), f"{sys.platform} on {platform.machine()} is not supported"
    for variant in variants:
        try:
            library = build_library(compiler, directory, variants=(variant,))
        except BuildError as exc:  # an old compiler does not support these instructions
            message = str(exc)
            if variant != variants[-1]:  # the caller logs the last error
                log.warning("the CPU kernels cannot be built for the instruction set %s: %s", variant, exc)
            continue
        if _runs(library):
            return library
    raise BuildError(message)


def _runs(library: Path) -> bool:
    """Return whether this machine can run a variant of the library.

    Raises:
        BuildError: the library cannot be loaded.
    """
    try:
        return int(ctypes.CDLL(str(library)).millrace_choose(b"")) == 0
    except OSError as exc:
        raise BuildError(str(exc)) from None


def build_library(
    compiler: Compiler, directory: Path, flags: Sequence[str] = (), *, variants: Sequence[str] | None = None
) -> Path:
    """Return the library for these sources and this compiler in `directory`, and build it if it is not there.

    A library has its final name only when it is complete. Of concurrent processes one builds it, the others wait.

    Args:
        flags: more flags of the compiler.
        variants: all of this architecture if not given.

    Raises:
        BuildError: the library cannot be built.
    """
    if not sys.platform.startswith("linux") or platform.machine() not in _VARIANTS:
        raise BuildError(f"{sys.platform} on {platform.machine()} is not supported")
    variants = tuple(_VARIANTS[platform.machine()]) if variants is None else variants
    try:
        directory = _make_private(directory)
        target = directory / f"{_digest(compiler, flags, variants)}.so"
        if not _is_private(target):
            with _lock(directory):
                if not _is_private(target):  # another process has built it meanwhile
                    _build(compiler, target, flags, variants)
    except OSError as exc:
        raise BuildError(str(exc)) from None
    return target


def _build(compiler: Compiler, target: Path, flags: Sequence[str], variants: Sequence[str]) -> None:
    _remove_interrupted(target.parent)
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as place:
        library = compile_library(compiler, Path(place), flags, variants=variants)
        library.chmod(0o700)  # the linker uses the umask
        library.rename(target)


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Lock the directory itself, which needs no further file."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _make_private(directory: Path) -> Path:
    """Create `directory` and return its path without links.

    Raises:
        BuildError: another user can write to it or replace it.
    """
    for path in (*reversed(directory.parents), directory):
        path.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(directory):
        raise BuildError(f"{directory} can be changed by another user; remove it")
    directory = directory.resolve()
    for parent in directory.parents:
        status = parent.stat()
        is_safe = bool(status.st_mode & stat.S_ISVTX) or not status.st_mode & 0o022
        if status.st_uid not in (0, os.geteuid()) or not is_safe:
            raise BuildError(f"{parent} can be changed by another user; run chmod go-w on it, or set XDG_CACHE_HOME")
    return directory


def _is_private(path: Path) -> bool:
    """Return whether `path` exists, is not a link, and only this user can write to it."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return not stat.S_ISLNK(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _digest(compiler: Compiler, flags: Sequence[str], variants: Sequence[str]) -> str:
    # Machines that share a home directory may have different instruction sets.
    return _digest_sources(platform.machine(), *compiler.command, compiler.version, *flags, *variants)


def _digest_sources(*parts: str) -> str:
    digest = hashlib.sha256("\0".join((*parts, repr(_COMMON), repr(_VARIANTS))).encode())
    for path in sorted(SOURCES.rglob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def _remove_interrupted(directory: Path) -> None:
    for path in directory.glob("build-*"):
        with contextlib.suppress(OSError):  # another process removes it, too
            if path.stat().st_mtime < time.time() - BUILD_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def compile_library(
    compiler: Compiler,
    place: Path,
    flags: Sequence[str] = (),
    *,
    variants: Sequence[str] | None = None,
    machine: str = "",
) -> Path:
    """Compile in the empty directory `place` and return the library.

    Args:
        variants: all of the architecture if not given.
        machine: the architecture for which the compiler compiles; that of this machine if not given.

    Raises:
        BuildError: the compiler fails.
    """
    common = (*compiler.command, *_COMMON, *flags)
    options = _VARIANTS[machine or platform.machine()]
    names = tuple(options) if variants is None else variants
    symbols = {name: name.replace("+", "_") for name in names}
    sources = {
        symbols[name]: ("variant/variant", (f"-DVARIANT={symbols[name]}", f'-DNAME="{name}"', *options[name]))
        for name in names
    }
    sources["pool"] = "pool", ()
    sources["library"] = "library", ("-DVARIANTS=" + " ".join(f"V({symbol})" for symbol in symbols.values()),)

    def compile_one(name: str) -> str:
        source, more = sources[name]
        _run(*common, *more, "-c", str(SOURCES / f"{source}.c"), "-o", str(place / f"{name}.o"))
        return str(place / f"{name}.o")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    library = place / "kernels.so"
    _run(*common, "-shared", "-pthread", *objects, "-o", str(library))
    return library


def _run(*command: str) -> None:
    try:
        # The command is the system's compiler with fixed arguments.
        subprocess.run(command, check=True, capture_output=True, timeout=BUILD_SECONDS)  # noqa: S603
    except subprocess.CalledProcessError as exc:
        message = exc.stderr.decode(errors="replace").strip()[-2000:]
        raise BuildError(f"{command[0]} failed: {message}") from None
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} did not finish within {BUILD_SECONDS} seconds") from None


def main() -> None:
    """Build the library of this machine with the first compiler that can, so that no worker waits for it."""
    if prebuilt_path().exists():
        return
    for compiler in find_compilers():
        with contextlib.suppress(BuildError, RuntimeError, OSError):  # the worker that loads it reports the reason
            build_for_machine(compiler, runnable_variants())
            return


if __name__ == "__main__":
    main()
