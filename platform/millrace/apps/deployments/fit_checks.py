"""Checks whether a machine of the platform can serve a model, before its deployment is added.

A web job runs `millrace models inspect` in a process of its own with a time limit. One check runs at a time, because it
measures the machine. Requests and results are in Valkey. A result names the machine whose web jobs ran the check.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import redis
from django.conf import settings
from django.utils.module_loading import import_string
from kombu.exceptions import OperationalError

from inference_worker.checkpoints.model_config import ModelError
from inference_worker.checkpoints.model_source import embedded_source
from inference_worker.contract import valkey
from inference_worker.contract.host import host_name
from inference_worker.contract.settings import EMBEDDED
from inference_worker.contract.texts import Text
from tenants.actions import ActionRefused, Conflict
from tenants.text_field import decode_text, encode_text

CHECK_SECONDS = 60.0
KEEP_SECONDS = 600
_RUNNING_SECONDS = 120  # after which a check whose web job was killed is forgotten
_MAX_RESULT_BYTES = 1 << 18
_KEY = "millrace:fit-check:{}"
_RUNNING_KEY = "millrace:fit-check-running"
_OPTIONS = {
    "max_model_len": "--context",
    "dtype": "--dtype",
    "quantization": "--quantization",
    "kv_cache_dtype": "--kv-dtype",
}


def do_start_fit_check(source: str, options: Mapping[str, Any]) -> str:
    """Start a check of the source with options of a deployment. Returns its ID for `read_fit_check`.

    Raises:
        Conflict: another check runs. ActionRefused: the broker cannot be reached.
    """
    check_id, arguments = secrets.token_hex(16), _make_arguments(options)
    try:
        with _broker() as broker:
            if not broker.set(_RUNNING_KEY, check_id, nx=True, ex=_RUNNING_SECONDS):
                raise Conflict(Text("Another fit check is running. Try again in a minute."))
            broker.set(_KEY.format(check_id), json.dumps({"state": "running"}), ex=_RUNNING_SECONDS)
            app = import_string(settings.CELERY_APP)
            try:
                app.send_task(
                    "deployments.check_fit", [check_id, source, arguments], retry=False, expires=CHECK_SECONDS
                )
            except OperationalError:
                broker.delete(_RUNNING_KEY)
                raise
    except (redis.RedisError, OperationalError) as exc:
        raise ActionRefused(Text("The check could not be started, because Valkey cannot be reached.")) from exc
    return check_id


def _make_arguments(options: Mapping[str, Any]) -> list[str]:
    """Return the options of a deployment as arguments of `millrace models inspect`."""
    arguments = [f"{flag}={options[name]}" for name, flag in _OPTIONS.items() if options.get(name)]
    memory = options.get("kv_cache_memory")
    return [*arguments, f"--kv-memory={memory}"] if memory else arguments


def run_fit_check(check_id: str, source: str, arguments: list[str]) -> None:
    """Run a check, and store its result. A second run replaces the result of the first one."""
    result = {"state": "done", "checked": [source, arguments], "host": host_name(), **_inspect(source, arguments)}
    with _broker() as broker:
        broker.set(
            _KEY.format(check_id),
            json.dumps(result),
            ex=KEEP_SECONDS,
        )
        if broker.get(_RUNNING_KEY) == check_id.encode():
            broker.delete(_RUNNING_KEY)


def read_fit_check(check_id: str) -> dict[str, Any] | None:
    """Return the state `running`, or `done` with a `report` or an `error`; None if the check is unknown or was lost.

    Raises:
        redis.RedisError: Valkey cannot be reached.
    """
    with _broker() as broker:
        stored: Any = broker.get(_KEY.format(check_id))
    found: dict[str, Any] | None = None if stored is None else json.loads(stored)
    if found is not None and "error" in found:
        found["error"] = decode_text(found["error"])
    return found


def find_misfit(check_id: str, source: str, options: Mapping[str, Any]) -> str:
    """Return why a check found that the source does not fit with these options; empty if it did not find that.

    A check of another source or of other options counts as none.
    """
    try:
        found = read_fit_check(check_id)
    except redis.RedisError:
        return ""
    if not found or found.get("checked") != [source, _make_arguments(options)] or found.get("report") is None:
        return ""
    return "" if found["report"]["can_serve"] else "; ".join(find_problems(found["report"]))


def find_problems(report: Mapping[str, Any]) -> list[str]:
    """Return the problems in a report of `millrace models inspect`."""
    problems = [problem["message"] for problem in report["checkpoint"]["problems"]]
    memory = (report["fit"] or {}).get("problem")
    return [*problems, memory] if memory else problems


def _inspect(source: str, arguments: list[str]) -> dict[str, Any]:
    """Return the report of `millrace models inspect`, or an error."""
    try:
        path = embedded_source(source) if source in EMBEDDED else Path(source).expanduser().absolute()
        is_missing = not path.exists()
    except (ModelError, OSError, RuntimeError, ValueError) as exc:  # such as a home directory of an unknown user
        return {"error": str(exc)}
    if is_missing:  # otherwise the command would look for it on the hub
        text = Text("%(path)s is neither a model directory nor a .gguf file on %(host)s.", path=path, host=host_name())
        return {"error": encode_text(text)}
    command = [sys.executable, "-m", "millrace.cli", "models", "inspect", str(path), *arguments, "--json"]
    process = subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=CHECK_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the process that measures the machine
        process.communicate()
        text = Text("The check took longer than %(seconds)s seconds.", seconds=round(CHECK_SECONDS))
        return {"error": encode_text(text)}
    try:
        return {"report": json.loads(output[:_MAX_RESULT_BYTES])}
    except ValueError:
        if lines := errors.decode("utf-8", "replace").strip().splitlines():
            return {"error": lines[-1][:1000]}
        return {"error": encode_text(Text("The check ended without a result."))}


def _broker() -> redis.Redis:
    return valkey.connect(settings.MILLRACE.valkey_url, valkey.PAGES)
