"""Command-line options that all benchmarks share."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def parse(
    parser: argparse.ArgumentParser, quick: Mapping[str, Any], arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """Add `--quick` to the parser, and parse. With it, `quick` replaces defaults but not given values."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser.add_argument(
        "--quick", action="store_true", help="run for a few seconds with tiny defaults: checks that the benchmark works"
    )
    if "--quick" in arguments:
        parser.set_defaults(**quick)
    return parser.parse_args(arguments)


def write_figures(options: argparse.Namespace, figures: Any) -> None:
    """Write the figures to the file of `--json`, if it is given."""
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2), encoding="utf-8")
