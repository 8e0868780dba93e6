"""Models on the hub: their names, and which of their files are needed. Nothing here opens a connection."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from inference_worker.checkpoints.checkpoint import MAX_WEIGHT_FILES
from inference_worker.checkpoints.model_config import ModelError, read_json
from inference_worker.checkpoints.model_store import check_file, check_repository

HubErrorCode = Literal[
    "not_found", "no_access", "offline", "unreachable", "checksum_mismatch", "disk_full", "unsupported", "damaged_file"
]

DEFAULT_REVISION = "main"
MAX_SETTINGS_BYTES = 256 << 20  # bytes of one configuration or tokenizer file; the tokenizer's limit, too
INDEX = "model.safetensors.index.json"
# The other files of the top directory that are downloaded. Pickled weights and weights of other libraries never are.
SETTINGS_FILES = (
    *("config.json", "generation_config.json", INDEX, "modules.json", "sentence_bert_config.json"),
    *("config_sentence_transformers.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "*.tiktoken"),
    *("sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json", "LICENSE*"),
    "README.md",  # its front matter has the license, and the task of a reranker
)
_MODULE_CONFIG = re.compile(r"\w{1,64}/config\.json")  # configurations of the modules of sentence-transformers
_SOURCE = re.compile(r"(?P<repository>[^@#]+)(?:@(?P<revision>[^#]+))?(?:#(?P<file>.+))?")
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,255}")
_GGUF_PARTS = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


class HubError(ModelError):
    """An error of a download. The message says what to do."""

    def __init__(self, code: HubErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class HubSource:
    """A model on the hub, as `organization/name[@revision][#file.gguf]`."""

    repository: str
    revision: str = DEFAULT_REVISION
    file: str | None = None  # the one to use of a repository with several .gguf files

    @classmethod
    def parse(cls, text: str) -> HubSource:
        """Parse a source.

        Raises:
            ModelError: it is not a model's id.
        """
        match = _SOURCE.fullmatch(text)
        if match is None:
            raise ModelError(f"{text!r} is not the id of a model on the hub; want organization/name[@revision]")
        source = cls(match["repository"], match["revision"] or DEFAULT_REVISION, match["file"])
        source.check()
        return source

    def check(self) -> None:
        """Check the form of all parts.

        Raises:
            ModelError: naming the invalid part.
        """
        check_repository(self.repository)
        if not _REVISION.fullmatch(self.revision) or ".." in self.revision:
            raise ModelError(f"{self.revision!r} is not a revision; want a branch, a tag or the hash of a commit")
        if self.file is not None:
            check_file(self.file)
            if not self.file.endswith(".gguf"):
                raise ModelError(f"{self.file!r} is not a .gguf file; other files are chosen without naming them")

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" + (f"#{self.file}" if self.file else "")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository, with the checksum that the hub states: SHA-256, or Git's for small files."""

    path: str
    size: int
    sha256: str | None = None
    blob_id: str | None = None


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A revision of a repository."""

    source: HubSource
    commit: str
    license: str | None
    files: Mapping[str, RemoteFile]


def settings_files(remote: RemoteModel) -> list[RemoteFile]:
    """Return the files of the model other than weights."""
    found = []
    for file in remote.files.values():
        is_known = "/" not in file.path and any(fnmatchcase(file.path, pattern) for pattern in SETTINGS_FILES)
        if not is_known and not ("modules.json" in remote.files and _MODULE_CONFIG.fullmatch(file.path)):
            continue
        check_file(file.path)
        if file.size > MAX_SETTINGS_BYTES:
            raise HubError("unsupported", f"{file.path}: {file.size:,} bytes is too large for a configuration file")
        found.append(file)
    return found


def remote_weights(remote: RemoteModel, directory: Path) -> list[RemoteFile]:
    """Return the files of weights: those of the index in the directory, `model.safetensors`, or all safetensors."""
    names = sorted(path for path in remote.files if fnmatchcase(path, "*.safetensors") and "/" not in path)
    if (directory / INDEX).exists():
        weight_map = read_json(directory / INDEX).get("weight_map")
        names = sorted({str(name) for name in weight_map.values()}) if isinstance(weight_map, dict) else []
    elif "model.safetensors" in names:
        names = ["model.safetensors"]
    if not names:
        pickled = any(path.endswith((".bin", ".pt", ".pth")) for path in remote.files)
        hint = "; its pickled weights can run code and are not read" if pickled else ""
        raise HubError("unsupported", f"{remote.source}: has no safetensors or .gguf files{hint}; choose another model")
    if len(names) > MAX_WEIGHT_FILES:
        raise HubError("unsupported", f"{remote.source}: {len(names)} weight files are too many")
    for name in names:
        check_file(name)
        if not name.endswith(".safetensors") or name not in remote.files:
            raise HubError(
                "damaged_file", f"{remote.source}: the index names {name!r}, which is not a file of the model"
            )
    return [remote.files[name] for name in names]


def choose_gguf(remote: RemoteModel) -> str | None:
    """Return the .gguf file to use; None: the model has safetensors files."""
    if remote.source.file is not None:
        if remote.source.file not in remote.files:
            raise HubError("not_found", f"{remote.source}: the model has no file {remote.source.file}")
        if _GGUF_PARTS.search(remote.source.file):
            raise _split_error(remote)
        return remote.source.file
    if any(path.endswith(".safetensors") for path in remote.files):
        return None
    files = [path for path in sorted(remote.files) if path.endswith(".gguf") and not _GGUF_PARTS.search(path)]
    if len(files) > 1:
        names = ", ".join(files[:20])
        raise HubError("unsupported", f"{remote.source}: has several .gguf files; add one as #file to the id: {names}")
    if files:
        check_file(files[0])
        return files[0]
    if any(map(_GGUF_PARTS.search, remote.files)):
        raise _split_error(remote)
    return None


def _split_error(remote: RemoteModel) -> HubError:
    text = "the parts of a split .gguf file are not supported: choose a model in one file, or download the parts and"
    return HubError("unsupported", f"{remote.source}: {text} merge them with `llama-gguf-split --merge`")
