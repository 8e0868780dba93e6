"""The functions of the C library, called with ctypes, which releases the interpreter's lock."""

from __future__ import annotations

import copy
import ctypes
import logging
from collections.abc import Sequence
from ctypes import c_char_p, c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from kernels.native.build import BuildError, build_for_machine, find_compilers, prebuilt_path, runnable_variants
from kernels.native.memory import HugePages

log = logging.getLogger(__name__)


def _fields(**types: str) -> list[tuple[str, Any]]:
    """Return the fields of a structure from the space-separated names of each type, in order."""
    kinds = {"pointers": c_void_p, "sizes": c_int64, "floats": c_float}
    return [(name, kinds[kind]) for kind, names in types.items() for name in names.split()]


class LinearArguments(ctypes.Structure):
    """`struct linear` in kernels.h."""

    _fields_ = _fields(
        pointers="x weight bias residual wide_residual out wide_out scales short_scales offsets codes row_scales "
        "following",
        sizes="rows inputs outputs x_stride residual_stride out_stride activation format group threads",
    )


class AttentionArguments(ctypes.Structure):
    """`struct attention` in kernels.h."""

    _fields_ = _fields(
        pointers="query key value out cache slots table starts lengths parts",
        sizes="sequences tokens heads kv_heads head_dim block_size table_stride query_stride kv_stride window "
        "cache_format",
        floats="scale soft_cap",
    )


class SelfAttentionArguments(ctypes.Structure):
    """`struct self_attention` in kernels.h."""

    _fields_ = _fields(
        pointers="query key value out starts parts",
        sizes="inputs heads kv_heads head_dim query_stride kv_stride before after",
        floats="scale",
    )


class LayerNormArguments(ctypes.Structure):
    """`struct layer_norm` in kernels.h."""

    _fields_ = _fields(pointers="x weight bias out", sizes="rows width", floats="eps")


class NormArguments(ctypes.Structure):
    """`struct norm` in kernels.h."""

    _fields_ = _fields(pointers="x wide_x weight residual out wide_out", sizes="rows width", floats="eps")


class RotationArguments(ctypes.Structure):
    """`struct rotation` in kernels.h."""

    _fields_ = _fields(pointers="x cos sin query_norm key_norm", sizes="rows heads head_dim rotated stride query_heads")


class LayerArguments(ctypes.Structure):
    """`struct layer` in kernels.h."""

    _fields_ = _fields(
        pointers="x out narrow wide middle cache before_attention after_attention before_mlp after_mlp "
        "query_norm key_norm qkv projection gated down rotation attention codes row_scales",
        sizes="rows window",
        floats="scale soft_cap",
    )


class LayersArguments(ctypes.Structure):
    """`struct layers` in kernels.h."""

    _fields_ = _fields(
        pointers="layers rotations attentions x out narrow wide middle codes row_scales", sizes="count rows"
    )


class MaximaArguments(ctypes.Structure):
    """`struct maxima` in kernels.h."""

    _fields_ = _fields(pointers="x out", sizes="rows width")


class RescoringArguments(ctypes.Structure):
    """`struct rescoring` in kernels.h."""

    _fields_ = _fields(pointers="x weight logits", sizes="rows inputs outputs x_stride")


class LookupArguments(ctypes.Structure):
    """`struct lookup` in kernels.h."""

    _fields_ = _fields(pointers="packed indexes out", sizes="count inputs")


class PackingArguments(ctypes.Structure):
    """`struct packing` in kernels.h."""

    _fields_ = _fields(pointers="weight packed", sizes="outputs inputs gated")


class Library:
    """A loaded library. Its functions take the address of their arguments' structure."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.memory = HugePages()  # memory of packed weights and caches

        def function(name: str, kind: type[ctypes.Structure]) -> Any:
            entry = getattr(library, f"millrace_{name}")
            entry.argtypes, entry.restype = [ctypes.POINTER(kind)], None
            return entry

        self.linear = function("linear", LinearArguments)
        self.attention = function("attention", AttentionArguments)
        self.norm = function("norm", NormArguments)
        self.rotation = function("rotation", RotationArguments)
        self.layers = function("layers", LayersArguments)
        self.self_attention = function("self_attention", SelfAttentionArguments)
        self.layer_norm = function("layer_norm", LayerNormArguments)
        self.argmax = function("argmax", MaximaArguments)
        self.rescore = function("rescore", RescoringArguments)
        self.lookup = function("lookup", LookupArguments)
        self.pack = function("pack", PackingArguments)
        self._choose = library.millrace_choose
        self._choose.argtypes, self._choose.restype = [c_char_p], c_int
        self.wide_bytes = library.millrace_wide_bytes  # memory for each number of the input of a bfloat16 product
        self.wide_bytes.argtypes, self.wide_bytes.restype = [], c_int64
        self._chosen = library.millrace_chosen
        self._chosen.argtypes, self._chosen.restype = [], c_char_p
        self.set_threads = library.millrace_set_threads
        self.set_threads.argtypes, self.set_threads.restype = [c_int64], None
        if not self.choose(""):
            raise OSError(f"{path} has no instruction set of this machine")

    @property
    def variant(self) -> str:
        """Return the name of the instruction set in use."""
        name: bytes = self._chosen()
        return name.decode()

    def with_own_memory(self) -> Library:
        """Return the library with memory of its own, for weights that are freed before others.

        Weights that share a mapping are freed only together, and the rest of the last mapping stays for the next ones.
        """
        other = copy.copy(self)
        other.memory = HugePages()
        return other

    def choose(self, name: str) -> bool:
        """Use the instruction set `name`, or the fastest one if `name` is empty. Return False if it is not
        available."""
        return int(self._choose(name.encode())) == 0


@cache
def load_library(variant: str = "") -> Library | None:
    """Return the library of the wheel, or build one at the first call. None, with a line in the log, if it cannot be
    built.

    Args:
        variant: the instruction set to use; empty: the fastest one of the machine.

    Raises:
        ValueError: the machine, or the compiler, does not have the instruction set.
    """
    library = _load_prebuilt() or _load_built(variant)
    if library is None:
        if variant:
            raise ValueError(f"the CPU kernels for {variant} cannot be built; the log has the reason")
        return None
    if not library.choose(variant):
        raise ValueError(_refuse(variant, runnable_variants()))
    log.info("CPU kernels: %s", library.variant)
    return library


def _refuse(variant: str, runnable: Sequence[str]) -> str:
    return f"this machine cannot run the CPU kernels for {variant}; it can run {', '.join(runnable)}"


def _load_prebuilt() -> Library | None:
    path = prebuilt_path()
    if not path.exists():
        return None
    try:
        return Library(path)
    except OSError as exc:  # built for a newer C library
        log.warning("the CPU kernels of the package cannot be loaded and are built here: %s", exc)
        return None


def _load_built(variant: str) -> Library | None:
    """Build the library with the first compiler that can.

    Raises:
        ValueError: the machine cannot run the variant.
    """
    runnable = runnable_variants()
    if variant and variant not in runnable:
        raise ValueError(_refuse(variant, runnable))
    compilers = find_compilers()
    if not compilers:
        log.info("no C compiler is installed (cc, gcc, clang or the package ziglang): PyTorch computes on the CPU")
    for compiler in compilers:
        try:
            return Library(build_for_machine(compiler, [variant] if variant else runnable))
        except (BuildError, OSError, RuntimeError) as exc:  # RuntimeError: the user has no home directory
            log.warning("the CPU kernels cannot be built with %s: %s", " ".join(compiler.command), exc)
    if compilers:
        log.warning("the CPU kernels cannot be built, so PyTorch computes")
    return None
