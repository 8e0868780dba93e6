"""Commands of managed engines: templates that a worker fills in and starts without a shell.

A template has shell words. The first words may set environment variables, and the next word is the program:

    VLLM_API_KEY={api_key} vllm serve {model} --host {host} --port {port} --max-model-len {context_length}

A placeholder is replaced within its word, so a value never becomes several words. The command line is visible to all
users of a machine, so `{api_key}` may only be in an environment variable.

A client of Valkey could otherwise make workers run programs. So the platform signs each managed deployment with
MILLRACE_WORKER_SECRET, and a worker starts only programs of MILLRACE_MANAGED_PROGRAMS.
"""

from __future__ import annotations

import hmac
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from inference_worker.contract.upstreams import UpstreamSpec

PLACEHOLDERS = ("model", "host", "port", "api_key", "context_length", "concurrency", "devices", "device_count")
MAX_WORDS = 256
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_ASSIGNMENT = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)
# Variables that choose what a program loads, or that Millrace reads itself.
_REFUSED = re.compile(r"PATH|HOME|IFS|SHELL|ENV|(?:LD|PYTHON|MILLRACE|DJANGO|BASH|NODE|PERL|RUBY|JAVA)_?.*")


@dataclass(frozen=True)
class ManagedCommand:
    """A parsed template."""

    environ: tuple[tuple[str, str], ...]
    words: tuple[str, ...]  # the program and its arguments

    @property
    def program(self) -> str:
        return self.words[0]

    def fill(self, values: Mapping[str, str | int]) -> tuple[dict[str, str], list[str]]:
        """Return the environment variables and the argument vector. `values` has all `PLACEHOLDERS`."""

        def replace(text: str) -> str:
            return _PLACEHOLDER.sub(lambda found: str(values[found[1]]), text)

        return {name: replace(value) for name, value in self.environ}, [replace(word) for word in self.words]


def parse_command(template: str) -> ManagedCommand:
    """Parse a template.

    Raises:
        ValueError: it is invalid. The message says how to correct it.
    """
    if not template.isprintable():
        raise ValueError("the command has a control character or a line break. Remove it")
    try:
        words = shlex.split(template)
    except ValueError as exc:
        raise ValueError(f"the command has invalid quotes: {exc}") from None
    environ: list[tuple[str, str]] = []
    while words and (found := _ASSIGNMENT.fullmatch(words[0])):
        if _REFUSED.fullmatch(found[1]):
            raise ValueError(f"the variable {found[1]} cannot be set. Set it for the worker instead")
        environ.append((found[1], found[2]))
        words.pop(0)
    if not words or len(words) > MAX_WORDS:
        raise ValueError(f"enter a program and its arguments, at most {MAX_WORDS} words")
    used = {name for text in (*words, *(value for _, value in environ)) for name in _PLACEHOLDER.findall(text)}
    if unknown := sorted(used - set(PLACEHOLDERS)):
        known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        raise ValueError(f"{{{unknown[0]}}} is no placeholder. Use {known}")
    if "{" in words[0]:
        raise ValueError("the program cannot have a placeholder. Enter its name or path")
    if "port" not in used:
        raise ValueError("the command needs {port}, the port that the server listens on")
    if any("{api_key}" in word for word in words):
        raise ValueError(
            "arguments are visible to all users of the machine. Pass {api_key} in a variable:"
            " VLLM_API_KEY={api_key} vllm serve …"
        )
    return ManagedCommand(tuple(environ), tuple(words))


def sign_managed(name: str, upstream: UpstreamSpec, worker_secret: str) -> str:
    """Return the signature of a managed deployment, which workers verify before they start its command."""
    signed = (name, upstream.command, upstream.model, upstream.preset, upstream.context_length, upstream.concurrency)
    message = b"millrace managed command\0" + msgspec.msgpack.encode(signed)
    return hmac.digest(worker_secret.encode(), message, "sha256").hex()


def is_signed(name: str, upstream: UpstreamSpec, signature: str, worker_secret: str) -> bool:
    return hmac.compare_digest(signature, sign_managed(name, upstream, worker_secret))
