"""Single files of the hub: from the local cache of the hub's library, or downloaded, and verified."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session, hf_hub_url, hf_raise_for_status, try_to_load_from_cache
from huggingface_hub.file_download import http_get
from huggingface_hub.utils._headers import build_hf_headers

from inference_worker.checkpoints import safetensors_header
from inference_worker.checkpoints.downloads.hub_source import HubError, RemoteFile, RemoteModel
from inference_worker.checkpoints.gguf_header import MAX_HEADER_BYTES, GGUFError, header_of
from inference_worker.checkpoints.model_store import CHUNK_BYTES, StoredFile, sync

Report = Callable[[int], None]  # called with the bytes of a file that are done

TIMEOUT_SECONDS = 30.0
REPORT_BYTES = 16 << 20
_LIBRARY = "millrace"


class FileFetcher:
    """A source of a model's files. `offline` restricts it to the local cache."""

    def __init__(self, remote: RemoteModel, endpoint: str | None, *, offline: bool) -> None:
        self._remote = remote
        self._endpoint = endpoint
        self._offline = offline

    def fetch(self, file: RemoteFile, target: Path, report: Report | None = None) -> StoredFile:
        """Write a file to `target` and verify it. An interrupted download is resumed.

        Raises:
            HubError: the checksum differs, or the file is not in the cache and there is no connection.
        """
        partial = target.with_name(f"{target.name}.part")
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():  # an earlier pull verified it, and was interrupted at another file
            with suppress(HubError):
                return StoredFile(file.path, file.size, verify(target, file))
            target.unlink()
        if cached := self._find_cached(file):
            partial.unlink(missing_ok=True)  # it may be a link, which must not be appended to
            _link_or_copy(cached, partial)
            with suppress(HubError):
                return _keep(partial, target, file)
        self._reject_offline(file)
        if file.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
            text = f"{file.path}: {file.size:,} bytes are too large to download; choose a model in smaller files"
            raise HubError("unsupported", text)
        if partial.exists() and partial.stat().st_size > file.size:
            partial.unlink()
        with _BoundedFile(partial, file.size, report) as out:
            http_get(self._url(file), out, resume_size=out.tell(), headers=_headers(), expected_size=file.size)
        return _keep(partial, target, file)

    def fetch_header(self, file: RemoteFile, target: Path) -> None:
        """Write the header of a file of weights to `target`, then zeros up to the file's size.

        Raises:
            HubError: the header is damaged or too large, or the file is not in the cache and there is no connection.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        if cached := self._find_cached(file):
            target.symlink_to(cached)
            return
        self._reject_offline(file)
        if file.path.endswith(".gguf"):
            self._fetch_gguf_header(file, target)
        else:
            start = self._range(file, CHUNK_BYTES // 4)
            size = 8 + int.from_bytes(start[:8], "little")
            if size > safetensors_header.MAX_HEADER_BYTES:
                raise HubError("damaged_file", f"{file.path}: a header of {size:,} bytes is too large")
            target.write_bytes(start if len(start) >= size else self._range(file, size))
        os.truncate(target, file.size)

    def _fetch_gguf_header(self, file: RemoteFile, target: Path) -> None:
        """Write the start of the file, in steps, until it has the header, whose length is not known before."""
        size = 8 * CHUNK_BYTES
        while True:
            target.write_bytes(self._range(file, size))
            try:
                header_of(target)
            except GGUFError as exc:
                if size >= min(MAX_HEADER_BYTES, file.size):
                    raise HubError("damaged_file", f"{file.path}: {exc}") from None
                size *= 2
            else:
                return

    def _range(self, file: RemoteFile, size: int) -> bytes:
        """Return at most the first `size` bytes of the file, also from a server that ignores the range."""
        headers = _headers() | {"range": f"bytes=0-{size - 1}", "accept-encoding": "identity"}
        data = bytearray()
        with get_session().stream("GET", self._url(file), headers=headers, timeout=TIMEOUT_SECONDS) as response:
            hf_raise_for_status(response)
            for chunk in response.iter_bytes(CHUNK_BYTES):
                data += chunk
                if len(data) >= size:
                    break
        return bytes(data[:size])

    def _find_cached(self, file: RemoteFile) -> Path | None:
        found = try_to_load_from_cache(self._remote.source.repository, file.path, revision=self._remote.commit)
        return Path(found).resolve() if isinstance(found, str) else None

    def _reject_offline(self, file: RemoteFile) -> None:
        if self._offline:
            text = (
                f"{self._remote.source}: {file.path} is not in the cache, or damaged; try again without HF_HUB_OFFLINE"
            )
            raise HubError("offline", text)

    def _url(self, file: RemoteFile) -> str:
        repository, commit = self._remote.source.repository, self._remote.commit
        return str(hf_hub_url(repository, file.path, revision=commit, endpoint=self._endpoint))


class _BoundedFile(io.BufferedRandom):
    """A file that a download is appended to, up to its size."""

    def __init__(self, path: Path, size: int, report: Report | None) -> None:
        super().__init__(io.FileIO(path, "a+"))
        self._size = size
        self._report = report
        self._reported = 0

    def write(self, data: Any, /) -> int:
        """Append data.

        Raises:
            HubError: the server sends more than the file's size.
        """
        if self.tell() + len(data) > self._size:
            raise HubError(
                "damaged_file", f"the server sends more than the {self._size:,} bytes of the file; try again"
            )
        written = super().write(data)
        position = self.tell()
        if self._report is not None and (position - self._reported >= REPORT_BYTES or position == self._size):
            self._report(position)
            self._reported = position
        return written


def verify(path: Path, file: RemoteFile) -> str:
    """Return the file's SHA-256.

    Raises:
        HubError: its size or checksum is not that of the hub.
    """
    size = path.stat().st_size
    digest = hashlib.sha256()
    git = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)  # as Git names a file's content
    with path.open("rb") as opened:
        while chunk := opened.read(CHUNK_BYTES):
            digest.update(chunk)
            if file.sha256 is None:
                git.update(chunk)
    expected, actual = (file.sha256, digest.hexdigest()) if file.sha256 else (file.blob_id, git.hexdigest())
    if expected is None:
        raise HubError("damaged_file", f"{file.path}: the hub states no checksum; use another mirror (HF_ENDPOINT)")
    if size != file.size or actual != expected:
        raise HubError(
            "checksum_mismatch",
            f"{file.path}: {size:,} bytes with the checksum {actual}; want {file.size:,} bytes with {expected}."
            " The damaged file was removed: pull the model again",
        )
    return digest.hexdigest()


def _keep(partial: Path, target: Path, file: RemoteFile) -> StoredFile:
    """Verify a downloaded file and give it its name, or remove it."""
    try:
        digest = verify(partial, file)
    except HubError:
        partial.unlink()
        raise
    sync(partial)
    partial.rename(target)
    return StoredFile(file.path, file.size, digest)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another file system, or of another user
        shutil.copyfile(source, target)


def _headers() -> dict[str, str]:
    """Return the headers of a request, with the token if there is one."""
    return dict(build_hf_headers(library_name=_LIBRARY))
