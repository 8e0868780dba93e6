"""`millrace models pull` against a local server with the hub's API."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_hub_download

from inference_worker.checkpoints import model_store
from inference_worker.checkpoints.downloads import hub_files
from inference_worker.checkpoints.downloads.hub import Hub
from inference_worker.checkpoints.downloads.hub_source import HubError, HubSource
from inference_worker.checkpoints.inspection import inspect_checkpoint
from inference_worker.checkpoints.model_config import ModelError
from inference_worker.checkpoints.model_source import embedded_source
from inference_worker.checkpoints.model_store import ModelStore
from tests.support.engine.tiny_qwen3 import write_qwen3
from tests.support.hub_server import TOKEN, HubServer, running_hub
from tests.support.waiting import eventually

ID = "tiny/qwen3"
SOURCE = HubSource(ID)
WEIGHTS = "model.safetensors"
PICKLED = ("pytorch_model.bin", "optimizer.pt", "consolidated.safetensors", "onnx/model.onnx", "train.py")


@pytest.fixture(autouse=True)
def _no_hub_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_qwen3(tmp_path_factory.mktemp("qwen3"))
    (directory / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    for name in PICKLED:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(b"never read")
    return directory


@pytest.fixture
def hub(checkpoint: Path) -> Iterator[HubServer]:
    with running_hub() as server:
        server.add(ID, checkpoint)
        yield server


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "data")


def pull(hub: HubServer, store: ModelStore, source: HubSource = SOURCE) -> model_store.StoredModel:
    return Hub(hub.url, offline=False).pull(source, store)


def fill_cache(hub: HubServer) -> Path:
    """Download the model with the hub's library, and return the file of its weights in the cache."""
    names = ("README.md", "config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS)
    paths = [hf_hub_download(ID, name, endpoint=hub.url, cache_dir=constants.HF_HUB_CACHE) for name in names]
    return Path(paths[-1]).resolve()


def millrace(*arguments: str, hub_url: str, data_dir: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "millrace.cli", "models", *arguments],
        capture_output=True,
        text=True,
        env=settings(hub_url, data_dir) | environ,
        timeout=100,
    )


def settings(hub_url: str, data_dir: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MILLRACE_", "HF_", "DJANGO_"))}
    own = {"HF_ENDPOINT": hub_url, "HF_HOME": str(data_dir / "hf"), "MILLRACE_DATA_DIR": str(data_dir / "state")}
    return kept | own | {"MILLRACE_MIN_FREE_DISK": "0"}


def test_only_needed_files_are_downloaded_and_their_checksums_recorded(
    hub: HubServer, store: ModelStore, checkpoint: Path
) -> None:
    pulled = pull(hub, store)
    expected = {"README.md", "config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS}
    assert {file.path for file in pulled.files} == expected
    assert {path.name for path in pulled.directory.iterdir()} == expected | {"manifest.json"}
    assert {name for name, _ in hub.downloads()} == expected
    assert all((pulled.directory / name).read_bytes() == (checkpoint / name).read_bytes() for name in expected)
    assert pulled.license == "apache-2.0"
    assert pulled.directory == store.directory(ID, hub.models[ID].commit)
    assert store.verify(pulled) == []
    hub.requests.clear()
    assert pull(hub, store) == pulled
    assert hub.downloads() == []
    assert store.partial_models() == []


def test_of_an_index_only_its_files_are_downloaded(hub: HubServer, store: ModelStore, tmp_path: Path) -> None:
    directory = write_qwen3(tmp_path / "sharded", shards=2)
    shutil.copy(directory / "model-00001-of-00002.safetensors", directory / "model.fp32.safetensors")
    hub.add("tiny/sharded", directory)
    pulled = pull(hub, store, HubSource("tiny/sharded"))
    weights = {file.path for file in pulled.files if file.path.endswith(".safetensors")}
    assert weights == {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}


def test_a_broken_connection_is_resumed(hub: HubServer, store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1)  # what is less than a chunk is lost
    hub.cut_at = len(hub.models[ID].files[WEIGHTS]) * 2 // 3
    assert store.verify(pull(hub, store)) == []
    ranges = [headers.get("range") or headers.get("Range") for _, headers in hub.downloads(WEIGHTS)]
    assert ranges == [None, f"bytes={hub.cut_at}-"]


def test_a_killed_pull_is_resumed_and_never_looks_complete(hub: HubServer, tmp_path: Path) -> None:
    hub.stall_at = 50_000
    command = [sys.executable, "-m", "millrace.cli", "models", "pull", ID]
    process = subprocess.Popen(command, env=settings(hub.url, tmp_path), stderr=subprocess.DEVNULL)
    store = ModelStore(tmp_path / "state")

    def has_begun() -> bool:
        assert process.poll() is None
        return bool(hub.downloads(WEIGHTS) and store.partial_models())

    eventually(has_begun)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert store.models() == []
    (partial,) = store.partial_models()
    assert partial.repository == ID
    listed = millrace("list", "--json", hub_url=hub.url, data_dir=tmp_path)
    assert [(row["repository"], row["state"]) for row in json.loads(listed.stdout)] == [(ID, "incomplete")]
    hub.stall_at = None
    hub.requests.clear()
    assert store.verify(pull(hub, store)) == []
    assert {name for name, _ in hub.downloads()} == {WEIGHTS}  # the other files were complete


def test_the_partial_file_of_an_earlier_process_is_continued(hub: HubServer, store: ModelStore) -> None:
    data = hub.models[ID].files[WEIGHTS]
    with store.stage(store.directory(ID, hub.models[ID].commit)) as staging:
        assert staging is not None
        (staging / f"{WEIGHTS}.part").write_bytes(data[:70_000])
    assert store.verify(pull(hub, store)) == []
    assert [headers.get("range") or headers.get("Range") for _, headers in hub.downloads(WEIGHTS)] == ["bytes=70000-"]


def test_a_server_that_ignores_ranges_sends_the_file_again(hub: HubServer, store: ModelStore) -> None:
    hub.ignores_ranges = True
    with store.stage(store.directory(ID, hub.models[ID].commit)) as staging:
        assert staging is not None
        (staging / f"{WEIGHTS}.part").write_bytes(hub.models[ID].files[WEIGHTS][:70_000])
    assert store.verify(pull(hub, store)) == []


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_wrong_checksum_is_an_error_and_the_file_is_removed(hub: HubServer, store: ModelStore, name: str) -> None:
    hub.corrupt = {name}
    with pytest.raises(HubError, match="checksum") as caught:
        pull(hub, store)
    assert caught.value.code == "checksum_mismatch"
    assert store.models() == []
    (partial,) = store.partial_models()
    assert not list(partial.directory.parent.rglob(f"{name}*"))
    hub.corrupt = set()
    assert store.verify(pull(hub, store)) == []


def test_more_bytes_than_the_files_size_are_an_error(hub: HubServer, store: ModelStore) -> None:
    hub.surplus = 1 << 20
    with pytest.raises(HubError, match="sends more") as caught:
        pull(hub, store)
    assert caught.value.code == "damaged_file"
    assert store.models() == []


def test_a_gated_model_needs_the_token_which_only_the_hub_receives(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.models[ID].is_gated = True
    refused = millrace("pull", ID, hub_url=hub.url, data_dir=tmp_path)
    assert refused.returncode == 3
    assert "HF_TOKEN" in refused.stderr
    hub.requests.clear()
    done = millrace("pull", ID, "--json", hub_url=hub.url, data_dir=tmp_path, HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    for _, path, headers in hub.requests:
        has_token = any(TOKEN in value for value in headers.values())
        assert has_token != path.startswith("/storage/"), path
    assert TOKEN not in done.stdout + done.stderr
    assert all(TOKEN.encode() not in path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file())


def test_missing_models_and_revisions_are_errors(hub: HubServer, store: ModelStore) -> None:
    for source in (HubSource("tiny/unknown"), HubSource(ID, "v9"), HubSource(ID, file="x.gguf")):
        with pytest.raises(HubError) as caught:
            pull(hub, store, source)
        assert caught.value.code == "not_found"
    assert store.partial_models() == []


def test_an_unreachable_hub_is_an_error(store: ModelStore, hub: HubServer, tmp_path: Path) -> None:
    done = millrace("pull", ID, hub_url="http://127.0.0.1:9", data_dir=tmp_path)
    assert done.returncode == 5
    assert "HF_ENDPOINT" in done.stderr


def test_a_full_disk_is_an_error_and_the_pull_can_continue(hub: HubServer, store: ModelStore) -> None:
    with pytest.raises(HubError, match="free space") as caught:
        Hub(hub.url, offline=False).pull(SOURCE, store, min_free_bytes=1 << 60)
    assert caught.value.code == "disk_full"
    assert hub.downloads(WEIGHTS) == []
    with store.stage(store.directory(ID, hub.models[ID].commit)) as staging:
        assert staging is not None
        (staging / f"{WEIGHTS}.part").symlink_to("/dev/full")
    with pytest.raises(HubError, match="full") as caught:
        pull(hub, store)
    assert caught.value.code == "disk_full"
    (staging / f"{WEIGHTS}.part").unlink()
    assert store.verify(pull(hub, store)) == []


def test_two_pulls_at_once_download_once(hub: HubServer, store: ModelStore) -> None:
    with ThreadPoolExecutor(4) as pool:
        pulled = list(pool.map(lambda _: pull(hub, store), range(4)))
    assert len(set(pulled)) == 1
    assert len(hub.downloads(WEIGHTS)) == 1


def test_a_pull_that_ends_at_any_write_leaves_no_damaged_model(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, left = model_store.sync, 0

    def stop(path: Path) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        sync(path)

    monkeypatch.setattr(model_store, "sync", stop)
    monkeypatch.setattr(hub_files, "sync", stop)
    for step in range(20):
        left, store = step, ModelStore(tmp_path / str(step))
        try:
            pull(hub, store)
        except KeyboardInterrupt:
            assert all(store.verify(model) == [] for model in store.models())
            left = 100
            assert store.verify(pull(hub, store)) == []
            assert store.partial_models() == []
        else:
            break
    assert step == 8  # five files, the manifest, and two directories


def test_the_local_cache_of_the_hubs_library_is_used(hub: HubServer, store: ModelStore, tmp_path: Path) -> None:
    fill_cache(hub)
    hub.requests.clear()
    assert store.verify(pull(hub, store)) == []
    assert hub.downloads() == []
    environ = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    offline = millrace("pull", ID, "--json", hub_url="http://127.0.0.1:9", data_dir=tmp_path, **environ)
    assert offline.returncode == 0, offline.stderr
    pulled = ModelStore(tmp_path / "state").find(ID)
    assert pulled is not None
    assert (pulled.commit, ModelStore(tmp_path / "state").verify(pulled)) == (hub.models[ID].commit, [])
    missing = millrace("pull", "tiny/other", hub_url=hub.url, data_dir=tmp_path, **environ)
    assert missing.returncode == 5
    assert "HF_HUB_OFFLINE" in missing.stderr


def test_a_damaged_file_in_the_cache_is_downloaded_instead(hub: HubServer, store: ModelStore) -> None:
    blob = fill_cache(hub)
    damaged = b"x" * blob.stat().st_size
    blob.write_bytes(damaged)
    hub.requests.clear()
    assert store.verify(pull(hub, store)) == []
    assert [name for name, _ in hub.downloads()] == [WEIGHTS]
    assert blob.read_bytes() == damaged  # the cache is not changed


@pytest.mark.parametrize(
    ("name", "weight_map"),
    [
        ("index of another directory", {"x": "../secret.safetensors"}),
        ("index of a missing file", {"x": "a.safetensors"}),
    ],
)
def test_a_hostile_index_is_an_error(
    hub: HubServer, store: ModelStore, tmp_path: Path, name: str, weight_map: dict[str, str]
) -> None:
    directory = write_qwen3(tmp_path / "hostile")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    hub.add(ID, directory)
    with pytest.raises(ModelError):
        pull(hub, store)
    assert store.models() == []


@pytest.mark.parametrize("text", ["", "name", "../x", "a/b/c", "a--b/c", "a/..", "/etc/passwd", "a/b@../x", "a/b#../x"])
def test_invalid_ids_are_rejected(text: str) -> None:
    with pytest.raises(ModelError):
        HubSource.parse(text)


def test_pickled_weights_are_rejected(hub: HubServer, store: ModelStore) -> None:
    hub.models[ID].files.pop(WEIGHTS)
    hub.models[ID].files.pop("consolidated.safetensors")
    with pytest.raises(HubError, match="pickled") as caught:
        pull(hub, store)
    assert caught.value.code == "unsupported"


def test_a_gguf_file_is_chosen_by_its_name(hub: HubServer, store: ModelStore) -> None:
    hub.models["tiny/gguf"] = model = type(hub.models[ID])({"a.Q4_0.gguf": b"first", "a.Q8_0.gguf": b"second"})
    with pytest.raises(HubError, match=r"a\.Q4_0\.gguf, a\.Q8_0\.gguf"):
        pull(hub, store, HubSource("tiny/gguf"))
    pulled = [pull(hub, store, HubSource("tiny/gguf", file=name)) for name in model.files]
    assert [one.source.read_bytes() for one in pulled] == [b"first", b"second"]
    assert len(store.directories("tiny/gguf")) == 2
    assert store.find("tiny/gguf", file="a.Q4_0.gguf") == pulled[0]


@pytest.mark.parametrize("file", [None, "a-00002-of-00002.gguf"])
def test_the_parts_of_a_split_gguf_file_are_rejected(hub: HubServer, store: ModelStore, file: str | None) -> None:
    names = ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf")
    hub.models["tiny/split"] = type(hub.models[ID])(dict.fromkeys(names, b"GGUF"))
    with pytest.raises(HubError, match=r"parts of a split \.gguf file are not supported: choose") as caught:
        pull(hub, store, HubSource("tiny/split", file=file))
    assert caught.value.code == "unsupported"
    assert hub.downloads() == []


def test_models_of_one_revision_are_not_mixed_up(hub: HubServer, store: ModelStore) -> None:
    hub.models[ID].files |= {"a.gguf": b"top", "q4/a.gguf": b"nested"}
    first = pull(hub, store)
    top, nested = (pull(hub, store, HubSource(ID, file=name)) for name in ("a.gguf", "q4/a.gguf"))
    assert (top.source.read_bytes(), nested.source.read_bytes()) == (b"top", b"nested")
    assert pull(hub, store) == first
    assert pull(hub, store, HubSource(ID, file="a.gguf")) == top


def test_a_file_that_was_damaged_after_an_interrupted_pull_is_downloaded_again(
    hub: HubServer, store: ModelStore
) -> None:
    with store.stage(store.directory(ID, hub.models[ID].commit)) as staging:
        assert staging is not None
        (staging / WEIGHTS).write_bytes(b"damaged")
    assert store.verify(pull(hub, store)) == []


def test_a_file_that_is_too_large_for_one_download_is_an_error(
    hub: HubServer, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", len(hub.models[ID].files[WEIGHTS]) - 1)
    with pytest.raises(HubError, match="too large to download") as caught:
        pull(hub, store)
    assert caught.value.code == "unsupported"


def test_verify_and_remove(hub: HubServer, tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return millrace(*arguments, hub_url=hub.url, data_dir=tmp_path)

    assert run("pull", ID).returncode == 0
    assert "match their checksums" in run("verify", ID).stdout
    (listed,) = json.loads(run("list", "--json").stdout)
    assert (listed["repository"], listed["state"], listed["license"]) == (ID, "complete", "apache-2.0")
    weights = Path(listed["source"]) / WEIGHTS
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    damaged = run("verify", ID)
    assert damaged.returncode == 1
    assert str(weights) in damaged.stdout
    removed = run("remove", ID)
    assert "Removed" in removed.stdout
    assert "cannot load it again until it is pulled" in removed.stderr
    assert json.loads(run("list", "--json").stdout) == []
    assert run("remove", ID).returncode == 4
    assert run("verify", ID).returncode == 4


def test_a_file_is_verified(hub: HubServer, tmp_path: Path) -> None:
    """A pulled file is compared with the checksum in its manifest, and another one with its own header."""

    def run(path: Path) -> subprocess.CompletedProcess[str]:
        return millrace("verify", str(path), hub_url=hub.url, data_dir=tmp_path)

    store = ModelStore(tmp_path)
    hub.models[ID].files |= {"a.gguf": b"top", "q4/a.gguf": b"nested"}
    for name in ("a.gguf", "q4/a.gguf"):
        weights = pull(hub, store, HubSource(ID, file=name)).source
        assert f"{name} of {ID} matches its checksum" in run(weights).stdout
        weights.write_bytes(b"bad")
        damaged = run(weights)
        assert (damaged.returncode, str(weights) in damaged.stdout) == (1, True)
    pulled = pull(hub, store)
    assert "match their checksums" in run(pulled.directory).stdout

    own = tmp_path / "own.gguf"
    data = embedded_source("embedded").read_bytes()
    own.write_bytes(data)
    assert hashlib.sha256(data).hexdigest() in run(own).stdout
    own.write_bytes(data[:-1])
    damaged = run(own)
    assert (damaged.returncode, "past the end of the file" in damaged.stdout) == (1, True)
    assert run(tmp_path).returncode == 4


def test_a_pull_waits_for_another_process(hub: HubServer, store: ModelStore) -> None:
    directory = store.directory(ID, hub.models[ID].commit)
    with store.stage(directory):
        thread = threading.Thread(target=pull, args=(hub, store))
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        assert hub.downloads() == []
    thread.join(30)
    assert store.find(ID) is not None


def test_a_model_on_the_hub_is_inspected_without_its_weights(hub: HubServer, store: ModelStore, tmp_path: Path) -> None:
    directory = write_qwen3(tmp_path / "wide", shards=2, hidden=2048)
    hub.add(ID, directory)
    inspected = millrace("inspect", ID, "--json", "--context", "256", hub_url=hub.url, data_dir=tmp_path)
    assert inspected.returncode == 0, inspected.stderr
    found = json.loads(inspected.stdout)
    local = json.loads(millrace("inspect", str(directory), "--json", hub_url=hub.url, data_dir=tmp_path).stdout)
    expected = {**local["checkpoint"], "path": f"{ID}@main", "license": "apache-2.0"}
    assert found["checkpoint"] == expected
    assert (found["can_serve"], found["fit"]["context"]) == (True, 256)
    assert found["fit"]["streams"] > 0
    for path in directory.glob("*.safetensors"):
        assert hub.sent[path.name] <= 1 << 18 < path.stat().st_size
    assert not (tmp_path / "state").exists()


def test_a_hostile_header_on_the_hub_is_an_error(hub: HubServer, tmp_path: Path) -> None:
    hub.models[ID].files[WEIGHTS] = (1 << 62).to_bytes(8, "little") + bytes(1000)
    with pytest.raises(HubError, match="too large"):
        Hub(hub.url, offline=False).fetch_headers(SOURCE, tmp_path)


def test_a_gguf_file_on_the_hub_is_inspected_without_its_weights(hub: HubServer, tmp_path: Path) -> None:
    data = embedded_source("embedded").read_bytes()
    hub.models["tiny/gguf"] = type(hub.models[ID])({"smollm2.gguf": data})
    path, _ = Hub(hub.url, offline=False).fetch_headers(HubSource("tiny/gguf"), tmp_path)
    expected = inspect_checkpoint(embedded_source("embedded"))
    assert replace(inspect_checkpoint(path), path=expected.path) == expected
    assert hub.sent["smollm2.gguf"] < len(data) // 5
    assert path.stat().st_blocks * 512 < len(data) // 5
