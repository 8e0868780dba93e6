"""Release of an unloaded model's memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc

import torch


def free_memory() -> None:
    """Return the memory of dropped objects to the system and to the device.

    The objects of the models that stay loaded are excluded from later collections again.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # a C library without malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
