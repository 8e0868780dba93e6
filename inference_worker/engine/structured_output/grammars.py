"""Structured output: compiled grammars, and the state of each output in its grammar. Does not import torch.

A grammar is compiled once per tenant and copied for each output. The allowed next tokens are a mask over the
vocabulary, which is computed while the device runs the forward pass. The grammar library is imported on first use;
without it, the engine serves all other requests.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.request import RequestRejected, StructuredSpec
from inference_worker.engine.structured_output.grammar_cache import CacheCapacity, TenantCache
from inference_worker.engine.structured_output.grammar_sandbox import GrammarSandbox, Vocabulary, compile_grammar
from inference_worker.engine.structured_output.grammar_text import grammar_text, iter_tools

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

CACHE = CacheCapacity(256 << 20, 1024)  # bytes and grammars of all tenants
TENANT_CACHE = CacheCapacity(64 << 20, 256)  # bytes and grammars of one tenant
_ENTRY_BYTES = 64 << 10  # minimum counted size of an entry
_MAX_MESSAGE_LENGTH = 300
_GRACE_SECONDS, _TOKEN_SECONDS = 0.25, 0.002  # CPU time of an output: initially, and for each token
_MAX_THREADS, _THREAD_ROWS = 8, 4  # threads that fill masks, and the rows that justify another thread
_LOOSE_SECONDS = 2.0  # to find the unenforceable tools

Masks = npt.NDArray[np.uint8]


class GrammarFailed(Exception):
    """An error: an output cannot be continued, because its grammar reached a limit of time or memory."""


class Grammar:
    """The state of one output in its grammar. Only drafts are removed, so a preempted output continues at its
    state."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self.matcher = matcher
        self.vocab_size = vocab_size
        self._seconds = self._draft_seconds = _GRACE_SECONDS  # remaining CPU time of the output, and of its drafts

    def fill(self, mask: Masks) -> None:
        """Set the bits of the allowed next tokens. After an error only the end is allowed, and `accept` raises."""
        began = time.thread_time()
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._seconds -= time.thread_time() - began

    def accept(self, token_id: int) -> None:
        """Advance by one token of the output.

        Raises:
            GrammarFailed: the grammar does not allow the token, or its check failed.
        """
        began = time.thread_time()
        accepted = self.matcher.consume_token(token_id)
        self._seconds += _TOKEN_SECONDS - (time.thread_time() - began)
        self._draft_seconds = min(_GRACE_SECONDS, self._draft_seconds + _TOKEN_SECONDS)
        if not accepted:
            raise GrammarFailed(_tidy(self.matcher.get_error()))
        if self._seconds < 0:
            raise GrammarFailed("it takes too much time")

    @property
    def complete(self) -> bool:
        """Return whether the output is complete, so that no token can follow."""
        return self.matcher.is_stopped()

    def forced_tokens(self, drafts: Sequence[int] = ()) -> list[int]:
        """Return the next tokens after `drafts` at positions where the grammar allows one token only. Return none
        while the grammar is too slow for drafts."""
        if self._draft_seconds < 0:
            return []
        began = time.thread_time()
        count = self.push(drafts)
        forced = self.matcher.compute_ff_tokens() if count == len(drafts) and not self.complete else []
        self.pop(count)
        self._draft_seconds -= time.thread_time() - began
        return forced

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of the tokens, which follow one another, the grammar allows; 0 while it is too slow for
        drafts."""
        if self._draft_seconds < 0:
            return 0
        began = time.thread_time()
        count = self.matcher.validate_tokens(list(token_ids))
        self._draft_seconds -= time.thread_time() - began
        return count

    def push(self, token_ids: Sequence[int]) -> int:
        """Advance by drafts, which `pop` removes, and return how many the grammar allows."""
        return self.matcher.try_consume_tokens(list(token_ids)) if token_ids else 0

    def pop(self, count: int) -> None:
        """Remove the last `count` tokens."""
        if count:
            self.matcher.rollback(count)


def fill_masks(grammars: Sequence[Grammar]) -> Masks:
    """Return the masks of the allowed next tokens: a row of bits per grammar, 1 for allowed tokens, lowest bit of a
    byte first."""
    masks = np.zeros((len(grammars), 4 * -(-grammars[0].vocab_size // 32)), dtype=np.uint8)
    work = list(zip(grammars, masks, strict=True))
    parts = max(1, min(_MAX_THREADS, os.cpu_count() or 1, len(work) // _THREAD_ROWS))
    others = [_threads().submit(_fill_all, work[i::parts]) for i in range(1, parts)]
    _fill_all(work[::parts])
    for other in others:
        other.result()
    return masks


def _fill_all(work: Iterable[tuple[Grammar, Masks]]) -> None:
    for grammar, mask in work:
        grammar.fill(mask)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MAX_THREADS - 1, thread_name_prefix="masks")


class GrammarCompiler:
    """A model's compiled grammars, cached per tenant. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        """
        Args:
            tokenizer: without one, every format is rejected.
            vocab_size: width of the model's logits, which may differ from the tokenizer's vocabulary.
        """
        self._model = tokenizer, vocab_size
        self._cache: TenantCache[StructuredSpec, Grammar | RequestRejected] = TenantCache(CACHE, TENANT_CACHE)
        self._compiling = threading.Lock()
        self._sandbox = GrammarSandbox(lambda: self._vocabulary)

    def start(self, tenant: str, spec: StructuredSpec) -> Grammar:
        """Return a grammar at its start, for one output. It is compiled unless the tenant's cache has it.

        Args:
            tenant: owner of the request, which the gateway determined from the API key.

        Raises:
            RequestRejected: the format is malformed or cannot be enforced.
        """
        found = self._cache.get(tenant, spec)
        if found is None:
            with self._compiling:
                found = self._cache.get(tenant, spec) or self._add(tenant, spec)
        if isinstance(found, RequestRejected):
            raise RequestRejected(found.code, found.message, found.param)
        return Grammar(found.matcher.deep_copy(), found.vocab_size)

    def knows(self, tenant: str, spec: StructuredSpec) -> bool:
        """Return whether `start` would be fast, because the result is cached."""
        return self._cache.get(tenant, spec) is not None

    def close(self) -> None:
        """Stop the sandbox process, if it runs. A compilation in another thread starts none after that."""
        self._sandbox.close()

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        tokenizer, vocab_size = self._model
        if tokenizer is None:
            raise RequestRejected("unsupported_schema", "this engine has no tokenizer")
        return Vocabulary(tokenizer.to_json(), max(vocab_size, tokenizer.vocab_size), tokenizer.eos_token_ids)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return self._vocabulary.load()

    def _add(self, tenant: str, spec: StructuredSpec) -> Grammar | RequestRejected:
        result: Grammar | RequestRejected
        try:
            result, size = self._compile(spec)
        except RequestRejected as exc:
            result, size = exc, 0
        except Exception:  # an error of the process, not of the grammar
            log.exception("a grammar could not be compiled")
            return RequestRejected("internal_error", "the structured output format could not be prepared; try again")
        self._cache.put(tenant, spec, result, size + max(_ENTRY_BYTES, len(spec.text) * 4))
        return result

    def _compile(self, spec: StructuredSpec) -> tuple[Grammar, int]:
        try:
            text, size = self._try_out(spec)
            matcher = compile_grammar(self._tokenizer, text)
        except ImportError:
            message = "this worker does not support structured output: llguidance is not installed"
            raise RequestRejected("unsupported_schema", message, spec.param) from None
        if matcher.is_error():
            raise _make_rejection(matcher.get_error(), spec)
        return Grammar(matcher, self._vocabulary.size), size

    def _try_out(self, spec: StructuredSpec) -> tuple[str, int]:
        """Return the text of a grammar that compiles, and its approximate size in bytes."""
        try:
            return self._check(spec, grammar_text(spec, token_of=self._token_of))
        except RequestRejected:
            unenforceable = self._unenforceable_tools(spec) if spec.constraint_type == "tools" else []
            if not unenforceable:
                raise
        return self._check(spec, grammar_text(spec, any_arguments=unenforceable, token_of=self._token_of))

    def _token_of(self, mark: str) -> int | None:
        tokenizer, _ = self._model
        return None if tokenizer is None else tokenizer.mark_id(mark)

    def _check(self, spec: StructuredSpec, text: str) -> tuple[str, int]:
        trial = self._sandbox.try_out(text)
        if trial.error is not None:
            raise _make_rejection(trial.error, spec, is_too_complex=trial.is_too_complex)
        return text, trial.size

    def _unenforceable_tools(self, spec: StructuredSpec) -> list[str]:
        """Return the names of non-strict tools whose schemas cannot be enforced. Their arguments may be any object."""
        unenforceable, give_up_at = [], time.monotonic() + _LOOSE_SECONDS
        for name, strict, alone in iter_tools(spec):
            try:
                if time.monotonic() < give_up_at or strict:
                    self._check(alone, grammar_text(alone, token_of=self._token_of))
                    continue
            except RequestRejected as exc:
                if strict:
                    raise RequestRejected(exc.code, f"tool {name}: {exc.message}", exc.param) from None
            unenforceable.append(name)
        return unenforceable


def _make_rejection(error: str, spec: StructuredSpec, *, is_too_complex: bool = False) -> RequestRejected:
    is_malformed = spec.constraint_type in ("regex", "grammar") and not is_too_complex
    code = "invalid_schema" if is_malformed else "unsupported_schema"
    subject = {"regex": "pattern", "grammar": "grammar", "tools": "tools' schemas"}.get(spec.constraint_type, "schema")
    return RequestRejected(code, f"the {subject} cannot be enforced: {_tidy(error)}", spec.param)


def _tidy(error: str) -> str:
    """Return the message in one line, without the library's advice to its callers."""
    return " ".join(error.split(" Enable ")[0].replace("<non-verbose/>", "").split())[:_MAX_MESSAGE_LENGTH]
