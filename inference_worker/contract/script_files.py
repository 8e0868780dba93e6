"""Scripts of other languages, in files of their own: Lua for Valkey, SQL for PostgreSQL."""

from __future__ import annotations

import re
from pathlib import Path


def read_script(path: Path, **values: object) -> str:
    """Return the text of a file, with `{{name}}` replaced by the value of this name."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: str(values[match[1]]), path.read_text(encoding="utf-8"))
