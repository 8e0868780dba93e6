"""Downloads from the Hugging Face hub, or a server with its API (`HF_ENDPOINT`), into the model store.

Only the command line and the supervisor import this module. Tokens come from the environment or from `hf auth login`;
they are sent to the hub and stored nowhere.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.utils.logging import get_logger
from huggingface_hub.utils.tqdm import disable_progress_bars

from inference_worker.checkpoints.downloads.hub_errors import as_hub_errors, disk_full
from inference_worker.checkpoints.downloads.hub_files import TIMEOUT_SECONDS, FileFetcher
from inference_worker.checkpoints.downloads.hub_source import (
    HubError,
    HubSource,
    RemoteFile,
    RemoteModel,
    choose_gguf,
    remote_weights,
    settings_files,
)
from inference_worker.checkpoints.model_store import ModelStore, StoredFile, StoredModel, check_files, read_manifest

Progress = Callable[[str, int, int], None]  # a file, the bytes done and the bytes in total, of all weights

MAX_FILES = 1 << 16  # in a repository
_SHA256_LETTERS = 64


class Hub:
    """A client of the hub. It uses files of the local cache (`HF_HOME`), and nothing else with `HF_HUB_OFFLINE=1`."""

    def __init__(self, endpoint: str | None = None, *, offline: bool | None = None) -> None:
        """Create a client. The defaults are those of the environment."""
        constants.HF_HUB_DISABLE_TELEMETRY = True
        disable_progress_bars()
        get_logger("huggingface_hub").setLevel("ERROR")
        self._endpoint = endpoint
        self._offline = constants.is_offline_mode() if offline is None else offline

    def describe(self, source: HubSource) -> RemoteModel:
        """Return the files of the model.

        Raises:
            HubError: the model is not found or not accessible, or the hub cannot be reached.
        """
        if self._offline:
            return _cached_model(source)
        with as_hub_errors(source, Path(constants.HF_HOME)):
            info = HfApi(endpoint=self._endpoint, library_name="millrace").model_info(
                source.repository, revision=source.revision, files_metadata=True, timeout=TIMEOUT_SECONDS
            )
        siblings = info.siblings or []
        if len(siblings) > MAX_FILES:
            raise HubError("unsupported", f"{source}: has more than {MAX_FILES} files")
        files = {}
        for sibling in siblings:
            sha256, blob_id = (sibling.lfs.sha256, None) if sibling.lfs else (None, sibling.blob_id)
            files[sibling.rfilename] = RemoteFile(sibling.rfilename, sibling.size or 0, sha256, blob_id)
        license_name = getattr(info.card_data, "license", None)
        return RemoteModel(source, str(info.sha), license_name if isinstance(license_name, str) else None, files)

    def pull(
        self, source: HubSource, store: ModelStore, progress: Progress | None = None, min_free_bytes: int = 0
    ) -> StoredModel:
        """Download the model into the store and verify its checksums. An interrupted download is resumed.

        A model that the store has is returned as it is. Processes that pull the same model wait for each other.

        Args:
            min_free_bytes: space to leave free on the disk.

        Raises:
            HubError: the model is not found or not accessible, a checksum differs, or the disk is full.
        """
        remote = self.describe(source)
        gguf = choose_gguf(remote)
        directory = store.directory(source.repository, remote.commit, gguf)
        with store.stage(directory) as staging, as_hub_errors(source, directory.parent):
            if staging is not None:
                files = self._download(remote, gguf, staging, progress, min_free_bytes)
                now = datetime.now(UTC).isoformat(timespec="seconds")
                store.publish(
                    StoredModel(
                        directory, source.repository, source.revision, remote.commit, now, remote.license, files
                    )
                )
            found = read_manifest(directory)  # before another process can remove it
            check_files(found)
        return found

    def fetch_headers(self, source: HubSource, directory: Path) -> tuple[Path, str | None]:
        """Write the model's settings and the headers of its weights to the empty directory.

        Return the path to inspect, and the model's license.

        Raises:
            HubError: the model is not found or not accessible, or a file is damaged.
        """
        remote = self.describe(source)
        gguf = choose_gguf(remote)
        fetcher = FileFetcher(remote, self._endpoint, offline=self._offline)
        with as_hub_errors(source, directory):
            for file in [] if gguf else settings_files(remote):
                fetcher.fetch(file, directory / file.path)
            for file in [remote.files[gguf]] if gguf else remote_weights(remote, directory):
                fetcher.fetch_header(file, directory / file.path)
        return directory / gguf if gguf else directory, remote.license

    def _download(
        self, remote: RemoteModel, gguf: str | None, staging: Path, progress: Progress | None, min_free_bytes: int
    ) -> tuple[StoredFile, ...]:
        """Write the files to the directory. The index of the weights, which determines them, is among the settings."""
        fetcher = FileFetcher(remote, self._endpoint, offline=self._offline)
        settings = [] if gguf else settings_files(remote)
        stored = [fetcher.fetch(file, staging / file.path) for file in settings]
        weights = [remote.files[gguf]] if gguf else remote_weights(remote, staging)
        total, done = sum(file.size for file in weights), 0
        needed = total - sum(_downloaded_bytes(staging, file) for file in weights)
        if (free := shutil.disk_usage(staging).free - min_free_bytes) < needed:
            text = f"{needed:,} bytes are needed, {max(0, free):,} are free"
            raise HubError("disk_full", disk_full(staging.parent, text))
        for file in weights:

            def report(count: int, name: str = file.path, before: int = done) -> None:
                if shutil.disk_usage(staging).free < min_free_bytes:  # others write to the disk, too
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if progress is not None:
                    progress(name, before + count, total)

            stored.append(fetcher.fetch(file, staging / file.path, report))
            done += file.size
        return tuple(stored)


def _downloaded_bytes(staging: Path, file: RemoteFile) -> int:
    for path in (staging / file.path, staging / f"{file.path}.part"):
        with suppress(OSError):
            return min(path.stat().st_size, file.size)
    return 0


def _cached_model(source: HubSource) -> RemoteModel:
    """Return the files that the local cache has of the model. Their blobs are named by their checksums."""
    root = Path(constants.HF_HUB_CACHE) / f"models--{source.repository.replace('/', '--')}"
    try:
        commit = (root / "refs" / source.revision).read_text(encoding="utf-8").strip()
    except OSError:
        commit = source.revision
    snapshot = root / "snapshots" / commit
    if not re.fullmatch(r"[0-9a-f]{40}", commit) or not snapshot.is_dir():
        raise HubError("offline", f"{source}: not in the cache {root.parent}; try again without HF_HUB_OFFLINE")
    files = {}
    for path in snapshot.rglob("*"):
        if path.is_file():
            name, blob = str(path.relative_to(snapshot)), path.resolve()
            sha256, blob_id = (blob.name, None) if len(blob.name) == _SHA256_LETTERS else (None, blob.name)
            files[name] = RemoteFile(name, blob.stat().st_size, sha256, blob_id)
    return RemoteModel(source, commit, None, files)
