"""The server of a managed engine: a child process that a worker starts, checks and stops."""

from __future__ import annotations

import http.client
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import structlog
import torch

from inference_worker.contract.managed_commands import parse_command
from inference_worker.contract.upstream_presets import preset_of
from inference_worker.contract.upstreams import UpstreamSpec
from inference_worker.worker.managed import guard

log = structlog.get_logger(__name__)

HOST = "127.0.0.1"
MAX_START_SECONDS = 1800.0  # until the server is healthy; large models are loaded for many minutes
STOP_SECONDS = 8.0  # from SIGTERM to SIGKILL
KILL_SECONDS = 7.0  # seconds of the guard from SIGKILL to its own end
CHECK_SECONDS = 5.0  # between health checks
CHECK_TIMEOUT_SECONDS = 5.0
MAX_UNHEALTHY_SECONDS = 60.0  # without a successful check; then the server is restarted
POLL_SECONDS = 0.2
# Variables that the server inherits. Those of the worker have its secrets, and others may have unrelated ones.
_INHERITED = re.compile(
    r"PATH|HOME|USER|LOGNAME|LANG|LC_.*|TZ|TMPDIR|LD_LIBRARY_PATH|XDG_CACHE_HOME|SSL_CERT_.*"
    r"|(?:CUDA|NVIDIA|NCCL|ROCR|HIP|HSA|ONEAPI|ZE|OMP|KMP|MKL|GOMP|OPENBLAS|TORCH|TORCHINDUCTOR|TRITON|RAY|VLLM|SGLANG|"
    r"OLLAMA|LLAMA|GGML|OPENVINO)_.*|HF_HOME|HF_HUB_OFFLINE|HF_HUB_CACHE|TRANSFORMERS_OFFLINE|TRANSFORMERS_CACHE"
)


class ManagedServerError(Exception):
    """Raised if a server cannot be started, or is not healthy in time."""


class ManagedServer:
    """A server with a process of its own. `start`, then `wait_until_healthy`, then `watch`; `stop` at any time."""

    def __init__(self, name: str, upstream: UpstreamSpec, programs: Sequence[str], logs: Path) -> None:
        """Fill in the command.

        Raises:
            ManagedServerError: the command is invalid, or its program is not allowed or missing.
        """
        try:
            command = parse_command(upstream.command)
        except ValueError as exc:
            raise ManagedServerError(f"{exc}.") from None
        path = _find_program(command.program, programs)
        self.port = _free_port()
        self.api_key = secrets.token_urlsafe(32)  # so that only this worker can use the server
        preset, devices = preset_of(upstream), _devices()
        self.base_url = f"http://{HOST}:{self.port}{preset.base_path}"
        self._health_path = preset.health_path
        environ, argv = command.fill(
            {
                "model": upstream.model,
                "host": HOST,
                "port": self.port,
                "api_key": self.api_key,
                "context_length": upstream.context_length,
                "concurrency": upstream.concurrency,
                "devices": ",".join(devices),
                "device_count": max(1, len(devices)),
            }
        )
        self._environ = server_environ(os.environ) | environ
        self._argv = [path, *argv[1:]]
        self._name = name
        self.log_path = logs / f"managed-{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None

    def start(self) -> None:
        """Start the process.

        Raises:
            ManagedServerError: it cannot be started.
        """
        arguments = [sys.executable, "-I", "-S", guard.__file__, str(self.log_path), str(STOP_SECONDS), *self._argv]
        try:
            self.log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._process = subprocess.Popen(  # noqa: S603 - an argument vector, no shell
                arguments,
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as exc:
            raise ManagedServerError(f"The managed server cannot be started: {exc.strerror}.") from exc
        self._started_at = time.monotonic()
        log.info("managed_server_started", model=self._name, port=self.port, pid=self._process.pid)

    def wait_until_healthy(self, is_abandoned: Callable[[], bool]) -> None:
        """Wait until the server is healthy. If it does not become healthy, stop it.

        Raises:
            ManagedServerError: it has ended, is not healthy in time, or `is_abandoned` returned True.
        """
        deadline = self._started_at + MAX_START_SECONDS
        try:
            while not self._is_healthy():
                if (reason := self._exit_reason()) is not None:
                    raise ManagedServerError(reason)
                if is_abandoned():
                    raise ManagedServerError("The deployment was removed before its server was ready.")
                if time.monotonic() >= deadline:
                    raise ManagedServerError(
                        f"The managed server was not healthy after {MAX_START_SECONDS:.0f} s. See {self.log_path}."
                    )
                time.sleep(POLL_SECONDS)
            if (owner := _listener_uid(self.port)) not in (None, os.geteuid()):
                raise ManagedServerError(f"The port of the managed server belongs to another user ({owner}).")
        except BaseException:
            self.stop()
            raise

    def watch(self, on_failure: Callable[[str], None]) -> None:
        """Check the server in a thread. Call `on_failure` once with the reason if it fails, after it was stopped."""
        self._watcher = threading.Thread(
            target=self._watch, args=(on_failure,), name=f"managed {self._name}", daemon=True
        )
        self._watcher.start()

    def stop(self) -> None:
        """Stop the server and all processes that it has started."""
        self._stopping.set()
        process = self._process
        if process is None:
            return
        if process.poll() is None and process.stdin is not None:
            with suppress(OSError):
                process.stdin.write(b"q")
                process.stdin.flush()
            try:
                process.wait(STOP_SECONDS + KILL_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()  # the command has asked the kernel to be killed with it
                process.wait()
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()

    def _watch(self, on_failure: Callable[[str], None]) -> None:
        healthy_at = checked_at = time.monotonic()
        while not self._stopping.wait(POLL_SECONDS):
            reason = self._exit_reason()
            now = time.monotonic()
            if reason is None and now - checked_at >= CHECK_SECONDS:
                if self._is_healthy():
                    healthy_at = time.monotonic()
                elif now - healthy_at >= MAX_UNHEALTHY_SECONDS:
                    reason = (
                        f"The managed server did not answer for {MAX_UNHEALTHY_SECONDS:.0f} s. See {self.log_path}."
                    )
                checked_at = time.monotonic()
            if reason is not None and not self._stopping.is_set():
                log.warning("managed_server_failed", model=self._name, reason=reason)
                self.stop()
                on_failure(reason)
                return

    def _exit_reason(self) -> str | None:
        """Return why the server has ended; None while it runs."""
        status = None if self._process is None else self._process.poll()
        if status is None:
            return None
        seconds = time.monotonic() - self._started_at
        return f"The managed server ended with status {status} after {seconds:.0f} s. See {self.log_path}."

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=CHECK_TIMEOUT_SECONDS)
        try:
            connection.request("GET", self._health_path, headers={"authorization": f"Bearer {self.api_key}"})
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def server_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a server inherits from the worker."""
    return {name: value for name, value in environ.items() if _INHERITED.fullmatch(name)}


def _find_program(name: str, allowed: Sequence[str]) -> str:
    """Return the path of a program.

    Raises:
        ManagedServerError: it is not allowed or missing.
    """
    if name not in allowed:
        raise ManagedServerError(f"MILLRACE_MANAGED_PROGRAMS of the worker does not have {name!r}.")
    path = shutil.which(name)
    if path is None:
        raise ManagedServerError(f"The worker's machine has no program {name!r}.")
    return path


def _devices() -> list[str]:
    """Return the GPUs of this worker: those of CUDA_VISIBLE_DEVICES, or else all."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [device for device in chosen.split(",") if device]
    return [str(number) for number in range(torch.cuda.device_count())]


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        port: int = server.getsockname()[1]
    return port


def _listener_uid(port: int) -> int | None:
    """Return the user whose process listens on a local port; None if the system does not report it."""
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "0A":
                    return int(fields[7])
    return None
