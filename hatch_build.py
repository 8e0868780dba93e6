"""The build hook of `make release`: it adds the C library of the CPU kernels to a wheel for this architecture.

Without HATCH_BUILD_HOOK_ENABLE_CUSTOM=true a wheel contains only the sources, which are compiled at their first use.
"""

from __future__ import annotations

import importlib
import platform
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsBuildHook(BuildHookInterface):
    """The compilation of the kernels before a wheel is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        sys.path.insert(0, self.root)
        library: Path = importlib.import_module("kernels.native.build").build_for_wheel()
        build_data["force_include"][str(library)] = f"kernels/native/prebuilt/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"
