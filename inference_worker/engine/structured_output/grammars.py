"""Answers held to a grammar: compiled grammars, and where each answer stands in its own. Free of torch.

A grammar is compiled once for each tenant and copied for each answer. What it allows next is a mask over the
vocabulary, computed while the device runs the forward pass. The library is loaded when first needed: an engine without
it serves all else.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from inference_worker.contract.request import RequestRejected, StructuredSpec
from inference_worker.contract.tokenizer import Tokenizer
from inference_worker.engine.structured_output.grammar_cache import CacheCapacity, TenantCache
from inference_worker.engine.structured_output.grammar_sandbox import GrammarSandbox, Vocabulary, compile_grammar
from inference_worker.engine.structured_output.grammar_text import each_tool, grammar_text

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

CACHE = CacheCapacity(256 << 20, 1024)  # of all tenants
TENANT_CACHE = CacheCapacity(64 << 20, 256)  # of one tenant
_ENTRY_BYTES = 64 << 10  # that an entry is counted as at least
_MAX_MESSAGE_LENGTH = 300
_GRACE_SECONDS, _TOKEN_SECONDS = 0.25, 0.002  # an answer's share of the processor, at first and with each token
_MOST_THREADS, _THREAD_ROWS = 8, 4  # that fill masks, and how many a thread is worth its while for
_LOOSE_SECONDS = 2.0  # to find which tools they are
_LACKING = re.compile(
    r"not supported|unimplemented|unknown format|not disjoint|unsatisfiable|registry|too (much|large|big)",
    re.IGNORECASE,
)

Masks = npt.NDArray[np.uint8]


class GrammarFailed(Exception):
    """An answer cannot be continued under its grammar: a limit of time or memory was reached."""


class Grammar:
    """Where one answer stands. Its tokens are never taken back, so a preempted answer continues where it stood."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self.matcher = matcher
        self.vocab_size = vocab_size
        self._seconds = _GRACE_SECONDS  # of the processor, that it may still take

    def fill(self, mask: Masks) -> None:
        """Set the bits of what may come next. One that fails here allows only the end, and `accept` says so."""
        began = time.thread_time()
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._seconds -= time.thread_time() - began

    def accept(self, token_id: int) -> None:
        """Go on by one token of the answer.

        Raises:
            GrammarFailed: the grammar does not allow it, or could not tell.
        """
        began = time.thread_time()
        accepted = self.matcher.consume_token(token_id)
        self._seconds += _TOKEN_SECONDS - (time.thread_time() - began)
        if not accepted:
            raise GrammarFailed(_tidy(self.matcher.get_error()))
        if self._seconds < 0:
            raise GrammarFailed("it takes too much time")

    @property
    def complete(self) -> bool:
        """Whether nothing can follow."""
        return self.matcher.is_stopped()


def fill_masks(grammars: Sequence[Grammar]) -> Masks:
    """Return what may come next: bits, a row for each grammar, 1 for what is allowed, a byte's lowest bit first."""
    masks = np.zeros((len(grammars), 4 * -(-grammars[0].vocab_size // 32)), dtype=np.uint8)
    work = list(zip(grammars, masks, strict=True))
    parts = max(1, min(_MOST_THREADS, os.cpu_count() or 1, len(work) // _THREAD_ROWS))
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
    return ThreadPoolExecutor(_MOST_THREADS - 1, thread_name_prefix="masks")


class GrammarCompiler:
    """A model's compiled grammars, cached for each tenant. May be called from any thread."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        """
        Args:
            tokenizer: without one, every form is refused.
            vocab_size: the width of the model's logits, which may be more than the tokenizer knows, or less.
        """
        self._model = tokenizer, vocab_size
        self._cache: TenantCache[StructuredSpec, Grammar | RequestRejected] = TenantCache(CACHE, TENANT_CACHE)
        self._compiling = threading.Lock()

    def start(self, tenant: str, spec: StructuredSpec) -> Grammar:
        """Return a grammar at its beginning, for one answer. Compile it if the tenant's cache does not have it.

        Args:
            tenant: whose request it is, as the gateway determined it from the API key.

        Raises:
            RequestRejected: it cannot be enforced, or is malformed.
        """
        found = self._cache.get(tenant, spec)
        if found is None:
            with self._compiling:
                found = self._cache.get(tenant, spec) or self._add(tenant, spec)
        if isinstance(found, RequestRejected):
            raise RequestRejected(found.code, found.message, found.param)
        return Grammar(found.matcher.deep_copy(), found.vocab_size)

    def knows(self, tenant: str, spec: StructuredSpec) -> bool:
        """Return true if `start` would be quick."""
        return self._cache.get(tenant, spec) is not None

    def close(self) -> None:
        """Stop the process in which grammars are tried out, if there is one."""
        if "_probe" in self.__dict__:
            self._probe.close()

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        tokenizer, vocab_size = self._model
        if tokenizer is None:
            raise RequestRejected("unsupported_schema", "this engine has no tokenizer")
        return Vocabulary(tokenizer.to_json(), max(vocab_size, tokenizer.vocab_size), tokenizer.eos_token_ids)

    @cached_property
    def _probe(self) -> GrammarSandbox:
        return GrammarSandbox(self._vocabulary)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return self._vocabulary.load()

    def _add(self, tenant: str, spec: StructuredSpec) -> Grammar | RequestRejected:
        made: Grammar | RequestRejected
        try:
            made, size = self._compile(spec)
        except RequestRejected as exc:
            made, size = exc, 0
        except Exception:  # no thread, no process, no memory: that says nothing of the grammar
            log.exception("a grammar could not be compiled")
            return RequestRejected("internal_error", "the form of the answer could not be prepared; try again")
        self._cache.put(tenant, spec, made, size + max(_ENTRY_BYTES, len(spec.text) * 4))
        return made

    def _compile(self, spec: StructuredSpec) -> tuple[Grammar, int]:
        try:
            text, size = self._try_out(spec)
            matcher = compile_grammar(self._tokenizer, text)
        except ImportError:
            message = "this worker cannot hold answers to a form: llguidance is not installed"
            raise RequestRejected("unsupported_schema", message, spec.param) from None
        if matcher.is_error():
            raise _rejected(matcher.get_error(), spec)
        return Grammar(matcher, self._vocabulary.size), size

    def _try_out(self, spec: StructuredSpec) -> tuple[str, int]:
        """Return the text of a grammar that can be compiled, and about how many bytes that takes."""
        try:
            return self._check(spec, grammar_text(spec))
        except RequestRejected:
            loose = self._loose_tools(spec) if spec.kind == "tools" else []
            if not loose:
                raise
        return self._check(spec, grammar_text(spec, any_arguments=loose))

    def _check(self, spec: StructuredSpec, text: str) -> tuple[str, int]:
        verdict = self._probe.try_out(text)
        if verdict.error is not None:
            raise _rejected(verdict.error, spec)
        return text, verdict.size

    def _loose_tools(self, spec: StructuredSpec) -> list[str]:
        """Tools, not strict, whose schemas cannot be enforced: their arguments are any object then."""
        loose, give_up_at = [], time.monotonic() + _LOOSE_SECONDS
        for name, strict, alone in each_tool(spec):
            try:
                if time.monotonic() < give_up_at or strict:
                    self._check(alone, grammar_text(alone))
                    continue
            except RequestRejected as exc:
                if strict or exc.code != "unsupported_schema":
                    raise RequestRejected(exc.code, f"tool {name}: {exc.message}", exc.param) from None
            loose.append(name)
        return loose


def _rejected(error: str, spec: StructuredSpec) -> RequestRejected:
    code = "unsupported_schema" if _LACKING.search(error) else "invalid_schema"
    what = {"regex": "pattern", "grammar": "grammar", "tools": "tools' schemas"}.get(spec.kind, "schema")
    return RequestRejected(code, f"the {what} cannot be enforced: {_tidy(error)}", spec.param)


def _tidy(error: str) -> str:
    """Return the message in one line, without advice for callers of the library."""
    return " ".join(error.split(" Enable ")[0].replace("<non-verbose/>", "").split())[:_MAX_MESSAGE_LENGTH]
