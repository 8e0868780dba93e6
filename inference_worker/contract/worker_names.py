"""Default names of workers: the model's name and the ID of the data directory.

The ID is random and stored once, so that workers of two hosts have different names, and a restarted worker finds its
journal again. The host's name is not used: those of containers and laptops change.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path

ID_FILE = "worker-id"
_ID = r"[0-9a-f]{8}"


def default_name(model: str, data_dir: Path) -> str:
    """Return the name of the worker of a model, if the settings name none."""
    return f"{model}-{read_worker_id(data_dir)}"


def read_worker_id(data_dir: Path) -> str:
    """Return the ID of the data directory. The first call creates it.

    Raises:
        SystemExit: the file of the ID is damaged, or cannot be read or written.
    """
    path = data_dir / ID_FILE
    try:
        if not path.exists():
            _store_id(path)
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as exc:
        raise SystemExit(f"MILLRACE_DATA_DIR: the ID of this host's workers cannot be stored or read: {exc}") from exc
    if not re.fullmatch(_ID, text):
        raise SystemExit(f"MILLRACE_DATA_DIR: {path} is damaged; restore it from a backup, or delete it for a new ID")
    return text


def _store_id(path: Path) -> None:
    """Store a new ID. Of several processes that start, the first one wins, and no partial file is ever visible."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{ID_FILE}.{secrets.token_hex(4)}")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(f"{secrets.token_hex(4)}\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(part, path)
    finally:
        part.unlink(missing_ok=True)
