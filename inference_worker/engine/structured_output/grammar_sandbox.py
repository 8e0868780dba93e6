"""Trial compilation of grammars in a separate process, because a hostile grammar can take seconds or gigabytes, or
crash.

The process `python -m inference_worker.engine.structured_output.grammar_sandbox` forks a child for each grammar, with
limits of time and memory. Only a grammar that compiles there is compiled in the engine's process. Messages are JSON
with a length (4 bytes, little-endian); the first message is the tokenizer's. The process ends when its standard input
is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

CPU_SECONDS = 1
MAX_GRAMMAR_BYTES = 48 << 20
_ADDRESS_SPACE = 512 << 20  # in addition to the sandbox's; much of it is reserved but never used
_ANSWER_SECONDS = 20.0  # also on a busy machine
_PROCESSES = 2  # for one grammar
_TRIAL_MASKS = 20
_MAX_ERROR_LENGTH = 2000  # characters; a pipe accepts them in one write
_SMALL = '{"grammars": [{"json_schema": {"type": "object"}}]}'


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The model data that a grammar needs: its tokenizer.json, the width of its logits and the ids that end a text."""

    tokenizer: str
    size: int
    eos_token_ids: tuple[int, ...]

    def load(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        # Tokens of letters are treated as one where a word is allowed: some masks take a third less time.
        slices = [*LLTokenizer.general_slices(), "[a-zA-Z]{1,30}"]
        return LLTokenizer(self.tokenizer, n_vocab=self.size, eos_token=list(self.eos_token_ids), slices=slices)


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """The result of a trial compilation."""

    error: str | None  # None: the grammar compiles
    size: int = 0  # approximate bytes of the compiled grammar
    is_too_complex: bool = False


_TOO_COMPLEX = SandboxResult("it takes too much time or memory", is_too_complex=True)


def compile_grammar(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """Return a matcher at the grammar's start. Its `get_error` returns the grammar's error, if any."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_items_in_row=500,
        step_lexer_fuel=50_000,  # for one mask: a few milliseconds; the next limit too
        step_max_items=10_000,
        max_lexer_states=10_000,  # a kilobyte or two each
        max_grammar_size=100_000,
        verbose_errors=False,
    )
    return LLMatcher(tokenizer, text, log_level=0, limits=limits)


class GrammarSandbox:
    """The client of the sandbox process, which is started on demand and after a crash. Thread-safe.

    Args:
        vocabulary: returns the model data that the process needs.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._process_lock = threading.Lock()
        self._trial = threading.Lock()

    def try_out(self, text: str) -> SandboxResult:
        """Return the result of compiling `text`. After `close`, nothing compiles.

        A process that ends before the time limit is replaced once: something else may have ended it.
        """
        with self._trial:
            for _ in range(_PROCESSES):
                process = self._running_process()
                if process is None:
                    break
                answer, is_late = self._compile(process, text)
                if answer is not None:
                    return answer
                if is_late:
                    break
            return _TOO_COMPLEX

    def _compile(self, process: subprocess.Popen[bytes], text: str) -> tuple[SandboxResult | None, bool]:
        """Return the process's answer, or None if the process ended; and whether the time limit ended it."""
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        alarm = threading.Timer(_ANSWER_SECONDS, end)
        alarm.start()
        try:
            _write(process.stdin, text)
            answer = _read(process.stdout)
        except OSError:
            answer = None
        finally:
            alarm.cancel()
        if answer is None:
            process.wait()  # so that the next trial starts another process
        return None if answer is None else SandboxResult(**answer), late.is_set()

    def close(self) -> None:
        """Stop the process permanently. A trial that another thread has started ends with it."""
        with self._process_lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()
        with self._trial:
            if self._process is not None:
                self._process.communicate()
                self._process = None

    def _running_process(self) -> subprocess.Popen[bytes] | None:
        """Return the process, which is started if it does not run. None: the sandbox is closed."""
        with self._process_lock:
            if self._is_closed:
                return None
            if self._process is not None and self._process.poll() is None:
                return self._process
            command = [sys.executable, "-m", "inference_worker.engine.structured_output.grammar_sandbox"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603 - our own
            self._process = process
        with contextlib.suppress(OSError):  # the process has ended: the next read reports it
            _write(process.stdin, asdict(self._vocabulary()))
        return process


def main() -> None:
    vocabulary = _read(sys.stdin.buffer)
    if vocabulary is None:
        return
    tokenizer = Vocabulary(**vocabulary).load()
    _try(tokenizer, _SMALL)  # creates the objects that all grammars share
    base = _try_apart(tokenizer, _SMALL).size
    while (text := _read(sys.stdin.buffer)) is not None:
        trial = _try_apart(tokenizer, text)
        size = max(0, trial.size - base)
        _write(sys.stdout.buffer, asdict(replace(trial if size <= MAX_GRAMMAR_BYTES else _TOO_COMPLEX, size=size)))


def _try_apart(tokenizer: LLTokenizer, text: str) -> SandboxResult:
    """Compile `text` in a child process. The size is the child's memory."""
    reader, writer = os.pipe()

    def child() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        room = _address_space() + _ADDRESS_SPACE
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # its crash messages are useless
        # The stack is smaller than those of the engine's threads. What does not overflow here does not overflow there.
        threading.stack_size(4 << 20)
        tried = threading.Thread(target=lambda: os.write(writer, _try(tokenizer, text).encode()))
        tried.start()
        tried.join()

    pid = _fork(child)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        error = pipe.read().decode()
    _, status, usage = os.wait4(pid, 0)
    size = usage.ru_maxrss << 10
    return replace(_TOO_COMPLEX, size=size) if status else SandboxResult(error or None, size)


def _try(tokenizer: LLTokenizer, text: str) -> str:
    matcher = compile_grammar(tokenizer, text)
    if matcher.is_error():
        return matcher.get_error()[:_MAX_ERROR_LENGTH]
    for _ in range(_TRIAL_MASKS):  # its first steps
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_stopped() or not mask:
            break
        matcher.consume_token((mask & -mask).bit_length() - 1)
    return matcher.get_error()[:_MAX_ERROR_LENGTH] if matcher.is_error() else ""


def _fork(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    finally:
        os._exit(status)


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _write(stream: IO[bytes] | None, value: Any) -> None:
    if stream is None:
        raise OSError("no pipe")
    raw = json.dumps(value).encode()
    stream.write(struct.pack("<I", len(raw)) + raw)
    stream.flush()


def _read(stream: IO[bytes] | None) -> Any:
    """Return the next message, or None at the end."""
    if stream is None:
        raise OSError("no pipe")
    head = stream.read(4)
    if len(head) < 4:
        return None
    raw = stream.read(struct.unpack("<I", head)[0])
    return json.loads(raw) if raw else None


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker handles Ctrl-C and closes the sandbox's input
    main()
