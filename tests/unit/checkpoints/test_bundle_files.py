"""Model bundles: the files that gateways need, packed, signed, checked and stored."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from inference_worker.checkpoints import bundle_files
from inference_worker.checkpoints.bundle_files import find_bundle, fingerprint_weights, pack_bundle, store_bundle
from inference_worker.checkpoints.model_config import ModelError
from inference_worker.checkpoints.pair_scoring import is_ranking
from inference_worker.contract.messages import Machine
from inference_worker.contract.model_bundles import (
    BundleManifest,
    BundleRefused,
    derive_salt,
    hash_bundle,
    read_manifest,
    sign_manifest,
)
from inference_worker.contract.prefix_digest import PrefixIndex, hash_block, make_digest

SECRET = "w" * 40


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory with the files of sentence-transformers, a ranking card and weights."""
    directory = tmp_path / "model"
    for name in ("config.json", "tokenizer.json", "modules.json", "1_Pooling/config.json", "2_Normalize/config.json"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(json.dumps({"name": name}))
    (directory / "README.md").write_text("---\nlicense: mit\npipeline_tag: text-ranking\n---\n# A long card\n")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "model.safetensors").write_bytes(bytes(range(256)) * 1024)
    (directory / "train.py").write_text("raise SystemExit")
    return directory


def files_of(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_a_bundle_has_what_gateways_read_and_no_weights(model: Path, tmp_path: Path) -> None:
    payload = pack_bundle(model)
    stored = store_bundle(payload, hash_bundle(payload), tmp_path / "bundles")
    assert files_of(stored) == files_of(model) - {"model.safetensors", "train.py"}
    assert (stored / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert is_ranking(stored / "README.md")
    assert pack_bundle(stored) == payload
    assert find_bundle(stored.name, tmp_path / "bundles") == stored


def test_a_changed_file_is_found_and_replaced(model: Path, tmp_path: Path) -> None:
    payload, bundles = pack_bundle(model), tmp_path / "bundles"
    stored = store_bundle(payload, hash_bundle(payload), bundles)
    (stored / "chat_template.jinja").write_text("changed")
    assert find_bundle(stored.name, bundles) is None
    assert store_bundle(payload, stored.name, bundles) == stored
    assert (stored / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_bundle_that_is_too_large_is_not_published(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum((model / name).stat().st_size for name in files_of(model) - {"model.safetensors", "train.py"})
    monkeypatch.setattr(bundle_files, "MAX_BUNDLE_BYTES", size)
    with pytest.raises(ModelError, match=f"at most {size}"):
        pack_bundle(model)


@pytest.mark.parametrize("name", ["../config.json", "/etc/passwd", "a/b/config.json", "train.py", "model.safetensors"])
def test_other_files_are_refused(name: str, tmp_path: Path) -> None:
    payload = msgspec.msgpack.encode({"config.json": b"{}", name: b"x"})
    with pytest.raises(BundleRefused, match="unknown file"):
        store_bundle(payload, hash_bundle(payload), tmp_path / "bundles")
    assert files_of(tmp_path) == set()


@pytest.mark.parametrize("payload", [b"", b"\x00", b"pickle", msgspec.msgpack.encode({"config.json": "text"})])
def test_another_content_is_refused(payload: bytes, tmp_path: Path) -> None:
    with pytest.raises(BundleRefused, match="unknown format"):
        store_bundle(payload, hash_bundle(payload), tmp_path)
    with pytest.raises(BundleRefused, match="changed in Valkey"):
        store_bundle(payload, "0" * 64, tmp_path)


def test_another_order_of_the_files_is_refused(tmp_path: Path) -> None:
    payload = msgspec.msgpack.encode({"tokenizer.json": b"{}", "config.json": b"{}"})
    with pytest.raises(BundleRefused, match="another order"):
        store_bundle(payload, hash_bundle(payload), tmp_path / "bundles")
    assert files_of(tmp_path) - {f"bundles/.{hash_bundle(payload)}.lock"} == set()


def test_a_manifest_is_signed_for_its_deployment() -> None:
    manifest = BundleManifest("m@1", "0" * 64, 300 << 10, 7)
    signed = sign_manifest(manifest, SECRET)
    assert read_manifest(signed, "m@1", SECRET) == manifest
    assert manifest.chunk_sizes == [256 << 10, 44 << 10]
    with pytest.raises(BundleRefused, match="MILLRACE_WORKER_SECRET"):
        read_manifest(signed, "m@1", "x" * 40)
    with pytest.raises(BundleRefused, match="another deployment"):
        read_manifest(signed, "m@2", SECRET)
    with pytest.raises(BundleRefused, match="unknown format 2"):
        read_manifest(sign_manifest(manifest, SECRET, 2), "m@1", SECRET)


@pytest.mark.parametrize("change", [{"num_bytes": 0}, {"num_bytes": (64 << 20) + 1}, {"digest": "../../etc"}])
def test_an_invalid_manifest_is_refused(change: dict[str, object]) -> None:
    manifest = msgspec.structs.replace(BundleManifest("m@1", "0" * 64, 1, 7), **change)
    with pytest.raises(BundleRefused):
        read_manifest(sign_manifest(manifest, SECRET), "m@1", SECRET)


def test_other_weights_have_another_fingerprint(model: Path) -> None:
    first = fingerprint_weights(model)
    assert fingerprint_weights(model) == first
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    assert fingerprint_weights(model) != first


def test_replicas_with_other_files_or_another_dtype_share_no_prefixes() -> None:
    machine = Machine("1", "cpu", 1, "bfloat16", 100, 16, bundle="b", weights="w")
    others = [msgspec.structs.replace(machine, **{name: "x"}) for name in ("bundle", "weights", "dtype")]
    assert len({each.variant for each in (machine, *others)}) == 4
    assert msgspec.structs.replace(machine, device="other", cores=2).variant == machine.variant
    assert msgspec.structs.replace(machine, bundle="").variant == b""
    assert derive_salt(b"salt", b"") == b"salt"
    tokens = list(range(40))
    salt = derive_salt(b"salt", machine.variant)
    hashes = [hash_block(None, tokens[:16], salt)]
    digests = {
        name: msgspec.structs.replace(make_digest(16, hashes), variant=each.variant)
        for name, each in (("a", machine), ("b", others[2]))
    }
    index = PrefixIndex()
    index.update({name: msgspec.msgpack.encode(digest) for name, digest in digests.items()})
    assert index.cached_tokens(tokens, b"salt", ["a", "b"]) == {"a": 16, "b": 0}
