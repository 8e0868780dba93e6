"""The files of model bundles (inference_worker.contract.model_bundles), packed by workers and stored by gateways.

Does not import torch.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from inference_worker.checkpoints.built_directories import build_once
from inference_worker.checkpoints.checkpoint import weight_files
from inference_worker.checkpoints.model_config import ModelError
from inference_worker.checkpoints.pair_scoring import RANKING_CARD, is_ranking
from inference_worker.contract.model_bundles import MAX_BUNDLE_BYTES, BundleRefused, hash_bundle

_NAMES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
)
_CARD = "README.md"
_MODULE = r"\w{1,64}/config\.json"  # the file of a module of sentence-transformers
_MAX_MODULES = 16
_SAMPLES = 16  # parts of a weight file that its fingerprint reads
_SAMPLE_BYTES = 64 << 10

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, bytes]).decode


@dataclass(frozen=True)
class StoredBundle:
    """The files of a bundle on this machine."""

    directory: Path
    digest: str
    created: int  # Unix seconds of the model's configuration


def pack_bundle(directory: Path) -> bytes:
    """Return the bundle of the model directory. Equal files give equal bytes.

    Raises:
        ModelError: the bundle is too large, or a file cannot be read.
    """
    try:
        paths = {name: path for name in _NAMES if (path := directory / name).is_file()}
        if "modules.json" in paths:
            modules = sorted(path for path in directory.glob("*/config.json") if _is_module(path, directory))
            paths |= {str(path.relative_to(directory)): path for path in modules[:_MAX_MODULES]}
        num_bytes = sum(path.stat().st_size for path in paths.values())
        if num_bytes > MAX_BUNDLE_BYTES - len(RANKING_CARD) - 4096:  # of names and lengths
            raise ModelError(
                f"{directory}: the configuration, tokenizer and chat template have {num_bytes} bytes, and gateways take"
                f" at most {MAX_BUNDLE_BYTES}"
            )
        files = {name: path.read_bytes() for name, path in paths.items()}
    except OSError as exc:
        raise ModelError(f"{directory}: cannot be read: {exc}") from None
    if is_ranking(directory / _CARD):
        files[_CARD] = RANKING_CARD
    return _encode(dict(sorted(files.items())))


def find_bundle(digest: str, bundles: Path) -> Path | None:
    """Return the directory of a stored bundle, or None if the bundle is not stored or was changed."""
    directory = bundles / digest
    try:
        is_unchanged = directory.is_dir() and hash_bundle(pack_bundle(directory)) == digest
    except ModelError:
        return None
    return directory if is_unchanged else None


def store_bundle(payload: bytes, digest: str, bundles: Path) -> Path:
    """Store the files of a bundle, and return their directory.

    Raises:
        BundleRefused: the bundle was changed, or is of an unknown format.
    """
    if hash_bundle(payload) != digest:
        raise BundleRefused("its bundle was changed in Valkey: the SHA-256 differs from that of its manifest")
    try:
        files = _decode(payload)
    except msgspec.MsgspecError as exc:
        raise BundleRefused(f"its bundle is of an unknown format: {exc}") from None
    for name in files:
        if name not in (*_NAMES, _CARD) and not re.fullmatch(_MODULE, name):
            raise BundleRefused(f"its bundle has the unknown file {name!r:.80}")

    def write(directory: Path) -> None:
        for name, content in files.items():
            path = directory / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        if hash_bundle(pack_bundle(directory)) != digest:
            raise BundleRefused("its bundle is of an unknown format: its files have another order or other names")

    return build_once(bundles / digest, write, lambda _: find_bundle(digest, bundles) is not None)


def fingerprint_weights(directory: Path) -> str:
    """Return an identity of the weights, from the names and sizes of their files and from parts of the contents.

    Other training changes almost all weights, so the parts differ. The whole files would take minutes to read.

    Raises:
        ModelError: there are no weight files.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path in weight_files(directory):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for number in range(_SAMPLES):
                file.seek(number * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _is_module(path: Path, directory: Path) -> bool:
    return path.is_file() and re.fullmatch(_MODULE, str(path.relative_to(directory))) is not None
