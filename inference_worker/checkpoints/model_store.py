"""The models that were pulled into the data directory, in `models/<organization>--<name>/<commit>/`.

A model is complete if its directory has this name: files are downloaded to a hidden directory beside it, which is
renamed at the end. The directory's manifest has the checksums.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from inference_worker.checkpoints.inspection import MANIFEST
from inference_worker.checkpoints.model_config import ModelError, read_json
from inference_worker.contract.command_line import format_command

Progress = Callable[[str, int, int], None]  # a file, the bytes done and the bytes in total

MANIFEST_VERSION = 1
CHUNK_BYTES = 1 << 20
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_FILE = re.compile(r"(?:[A-Za-z0-9][\w.-]{0,250}/)?[A-Za-z0-9][\w.-]{0,250}")
_MIN_COMMIT_LETTERS = 7
_PARTIAL = ".partial"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a pulled model. `path` is relative to the model's directory."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A pulled model, as its manifest describes it."""

    directory: Path
    repository: str
    revision: str  # a branch, tag or commit, as it was requested
    commit: str
    pulled_at: str  # in ISO 8601
    license: str | None
    files: tuple[StoredFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def source(self) -> Path:
        """Return what a deployment names as its source: the directory, or the .gguf file in it."""
        weights = [file.path for file in self.files if file.path.endswith(".gguf")]
        return self.directory / weights[0] if weights else self.directory

    def matches(self, repository: str, revision: str | None = None, file: str | None = None) -> bool:
        """Return whether it is the named model."""
        return (
            self.repository == repository
            and (revision is None or revision == self.revision or _is_prefix(revision, self.commit))
            and (file is None or any(stored.path == file for stored in self.files))
        )


@dataclass(frozen=True, slots=True)
class PartialModel:
    """A model whose pull has not finished."""

    directory: Path  # place of the complete model, which does not exist
    repository: str

    @property
    def num_bytes(self) -> int:
        return sum(path.lstat().st_size for path in _partial(self.directory).rglob("*") if path.is_file())

    def matches(self, repository: str, revision: str | None = None, file: str | None = None) -> bool:
        """Return whether it is the named model."""
        name = self.directory.name
        return (
            self.repository == repository
            and (revision is None or _is_prefix(revision, name))
            and (file is None or name.endswith(f"-{_stem(file)}"))
        )


class ModelStore:
    """The pulled models of one data directory. Processes may use it concurrently."""

    def __init__(self, data_dir: Path) -> None:
        self._root = data_dir / "models"

    def models(self) -> list[StoredModel]:
        """Return the complete models, by repository and the time of the pull. Damaged manifests are left out."""
        found = []
        for path in self._root.glob(f"*--*/[!.]*/{MANIFEST}"):
            try:
                found.append(read_manifest(path.parent))
            except ModelError:
                continue
        return sorted(found, key=lambda model: (model.repository, model.pulled_at))

    def partial_models(self) -> list[PartialModel]:
        """Return the models whose pull has not finished. Some may be running."""
        paths = sorted(self._root.glob(f"*--*/.*{_PARTIAL}"))
        return [
            PartialModel(path.with_name(path.name[1 : -len(_PARTIAL)]), path.parent.name.replace("--", "/", 1))
            for path in paths
        ]

    def find(self, repository: str, revision: str | None = None, file: str | None = None) -> StoredModel | None:
        """Return the complete model that was pulled last from the repository, or None.

        Args:
            revision: a commit, its first 7 or more letters, or the branch or tag that was requested.
            file: the .gguf file of a repository that has several.
        """
        models = [model for model in self.models() if model.matches(repository, revision, file)]
        return models[-1] if models else None

    def directories(self, repository: str, revision: str | None = None, file: str | None = None) -> list[Path]:
        """Return the directories of the repository's models, complete or not. Arguments are as those of `find`."""
        models: list[StoredModel | PartialModel] = [*self.models(), *self.partial_models()]
        return sorted({model.directory for model in models if model.matches(repository, revision, file)})

    def directory(self, repository: str, commit: str, file: str | None = None) -> Path:
        """Return the directory of a complete model, which may not exist."""
        check_repository(repository)
        if not re.fullmatch(r"[0-9a-f]{40}", commit):
            raise ModelError(f"{commit!r} is not the hash of a commit")
        name = commit if file is None else f"{commit}-{_stem(file)}"
        return self._root / repository.replace("/", "--") / name

    @contextmanager
    def stage(self, directory: Path) -> Iterator[Path | None]:
        """Lock the model while the block runs.

        Return the directory for its download, with the files of an interrupted pull; None if the model is complete.
        """
        with _lock(directory):
            if directory.is_dir():
                yield None
            else:
                partial = _partial(directory)
                partial.mkdir(exist_ok=True)
                yield partial

    def publish(self, manifest: StoredModel) -> None:
        """Complete a staged model, whose lock is held: write its manifest, then give the directory its name."""
        directory = manifest.directory
        partial = _partial(directory)
        known = {file.path for file in manifest.files}
        for path in sorted(partial.rglob("*"), reverse=True):  # files of an earlier selection
            if path.is_dir():
                if not any(path.iterdir()):
                    path.rmdir()
            elif str(path.relative_to(partial)) not in known:
                path.unlink()
        fields = {key: value for key, value in asdict(manifest).items() if key != "directory"}
        text = json.dumps({"version": MANIFEST_VERSION, **fields}, indent=2)
        (partial / MANIFEST).write_text(f"{text}\n", encoding="utf-8")
        sync(partial / MANIFEST)
        for path in [*(path for path in partial.rglob("*") if path.is_dir()), partial]:
            sync(path)
        partial.rename(directory)
        sync(directory.parent)

    def verify(self, model: StoredModel, progress: Progress | None = None) -> list[str]:
        """Return what differs from the manifest: missing files, sizes and checksums."""
        problems, done = [], 0
        for file in model.files:
            path = model.directory / file.path
            if problem := size_problem(path, file.size):
                problems.append(problem)
            elif (digest := _sha256(path, progress, done, model.num_bytes)) != file.sha256:
                problems.append(f"{path}: the checksum is {digest}; want {file.sha256}")
            done += file.size
        return problems

    def remove(self, directory: Path) -> None:
        """Remove a model, complete or not. A process that has its files open can still read them."""
        with _lock(directory):
            for path in (directory, _partial(directory)):
                if path.exists():
                    removed = path.with_name(f".{directory.name}.{uuid.uuid4().hex}.removed")
                    path.rename(removed)
            for path in directory.parent.glob(f".{directory.name}.*.removed"):  # also of a process that was killed
                shutil.rmtree(path)


def read_manifest(directory: Path) -> StoredModel:
    """Return the pulled model in the directory.

    Raises:
        ModelError: there is no manifest, or it is damaged.
    """
    raw = read_json(directory / MANIFEST)
    try:
        if raw.pop("version") != MANIFEST_VERSION:
            raise ValueError("of another version")
        files = tuple(StoredFile(str(file["path"]), int(file["size"]), str(file["sha256"])) for file in raw["files"])
        fields: dict[str, Any] = {**raw, "files": files, "directory": directory}
        model = StoredModel(**fields)
        check_repository(model.repository)
        for file in files:
            check_file(file.path)
    except (KeyError, TypeError, ValueError, ModelError) as exc:
        raise ModelError(f"{directory / MANIFEST}: damaged ({exc}); remove the model and pull it again") from None
    return model


def find_stored(path: Path) -> StoredModel | None:
    """Return the pulled model in a directory, or the part of it that is one file; None if the path was not pulled.

    Raises:
        ModelError: its manifest is damaged.
    """
    path = path.absolute()
    for directory in (path,) if path.is_dir() else (path.parent, path.parent.parent):
        if (directory / MANIFEST).is_file():
            model = read_manifest(directory)
            files = tuple(file for file in model.files if path in (directory, directory / file.path))
            return replace(model, files=files) if files else None
    return None


def compute_checksum(path: Path, progress: Progress | None = None) -> str:
    """Return the SHA-256 of a file."""
    return _sha256(path, progress, 0, path.stat().st_size)


def check_files(model: StoredModel) -> None:
    """Check that all files exist in their sizes, without reading them.

    Raises:
        ModelError: naming the first problem.
    """
    for file in model.files:
        if problem := size_problem(model.directory / file.path, file.size):
            removal = format_command(f"models remove {model.repository}")
            raise ModelError(f"{problem}: run `{removal}` and pull it again")


def check_repository(repository: str) -> None:
    """Check the form `organization/name`.

    Raises:
        ModelError: it has another form.
    """
    if not _REPOSITORY.fullmatch(repository) or "--" in repository or ".." in repository:
        raise ModelError(f"{repository!r} is not the id of a model on the hub; want organization/name")


def check_file(path: str) -> None:
    """Check the relative path of a model's file: a name, or a directory and a name.

    Raises:
        ModelError: it is something else.
    """
    if not _FILE.fullmatch(path):
        raise ModelError(f"{path!r} is not the path of a model's file")


def size_problem(path: Path, size: int) -> str | None:
    """Return how the file differs from its size, or None."""
    try:
        actual = path.stat().st_size
    except OSError as exc:
        return f"{path}: {exc.strerror}"
    return None if actual == size else f"{path}: has {actual} bytes; want {size}"


def sync(path: Path) -> None:
    """Write a file or the entries of a directory to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path, progress: Progress | None, done: int, total: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(path.name, done, total)
    return digest.hexdigest()


def _is_prefix(revision: str, name: str) -> bool:
    return len(revision) >= _MIN_COMMIT_LETTERS and name.startswith(revision)


def _stem(file: str) -> str:
    return file.removesuffix(".gguf").replace("/", "--")


def _partial(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}{_PARTIAL}")


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f".{directory.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, also by a crash
        yield
