"""The embedded model, converted once for all test processes of a checkout. Otherwise each platform converts it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONVERTER = tuple(sorted((ROOT / "inference_worker" / "checkpoints").glob("gguf_*.py")))


def models_data_dir() -> Path:
    """Return the data directory of the shared models, a separate one for each version of the converter.

    `ensure_model` is safe in concurrent processes. `make clean` removes the directory.
    """
    assert CONVERTER, "the converter has other files now"
    digest = hashlib.blake2b(b"".join(path.read_bytes() for path in CONVERTER), digest_size=6).hexdigest()
    directory = ROOT / ".pytest_cache" / "d" / f"converted-{digest}"
    (directory / "models").mkdir(parents=True, exist_ok=True)
    return directory


def share_models(data_dir: Path, shared: Path | None = None) -> None:
    """Let the data directory of a platform, a gateway or a worker have the shared models. Create it if needed.

    Args:
        shared: data directory with the models; None: that of all test processes.
    """
    if not data_dir.exists():
        data_dir.mkdir()
        data_dir.chmod(0o711 if os.geteuid() == 0 else 0o700)  # as `millrace up` creates it
    (data_dir / "models").symlink_to((shared or models_data_dir()) / "models", target_is_directory=True)
