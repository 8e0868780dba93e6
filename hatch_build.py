"""The build hook: it builds the files that are generated from others, and with `make release` the kernels.

Without MILLRACE_WHEEL_KERNELS=1 a wheel contains only the sources of the CPU kernels, which are compiled at their first
use. With it, the wheel is for this architecture and contains their C library.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GeneratedFilesBuildHook(BuildHookInterface):
    """The generation of files before a distribution is built or the checkout is installed."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        sys.path.insert(0, self.root)
        importlib.import_module("tools.build_files").main()
        if self.target_name != "wheel" or version == "editable" or not os.environ.get("MILLRACE_WHEEL_KERNELS"):
            return
        library: Path = importlib.import_module("kernels.native.build").build_for_wheel()
        build_data["force_include"][str(library)] = f"kernels/native/prebuilt/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"
