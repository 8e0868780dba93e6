"""Responses in OpenAI's format. Chat completions and completions differ only in the format of a choice."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.messages import AnswerEvent, End, Finished, Tokens
from inference_worker.contract.request import FinishReason, ServiceClass, TokenCounts, TokenLogprobs
from millrace.gateway.core.types import ResponseSpec, usage_so_far
from millrace.gateway.protocols.answer_validity import validity
from millrace.gateway.protocols.openai.logprobs import (
    TokenSpeller,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from millrace.gateway.protocols.openai.usage import usage_object
from millrace.gateway.protocols.tool_parsers.base import AnswerText, CallArguments, CallStart, Piece
from millrace.gateway.protocols.tool_parsers.registry import parser_of
from millrace.gateway.protocols.tools import call_id

DONE = b"[DONE]"
TIERS = {ServiceClass.PRIORITY: "priority", ServiceClass.FLEX: "flex"}
_encode = msgspec.json.Encoder().encode


class OpenAIWriter(ABC):
    """A `Writer` for one response."""

    def __init__(self, spec: ResponseSpec, tokenizer: Tokenizer) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._prompt: TokenCounts | None = None
        self._output_tokens = 0
        self._reasoning_tokens = 0
        self._unfinished = dict.fromkeys(range(spec.answers))
        self._spellers: dict[int, TokenSpeller] = {}  # choice -> its tokens' texts

    def stream(self, event: AnswerEvent) -> list[bytes]:
        choices: list[dict[str, Any]] = []
        if isinstance(event, Tokens):
            self._count(event)
            choices = self._deltas(event)
        elif isinstance(event, Finished):
            choices = self._finish(event.index, event.finish_reason)
        elif isinstance(event, End):
            choices = [
                choice for index in list(self._unfinished) for choice in self._finish(index, event.finish_reason)
            ]
        usage = self._usage(event) if self._spec.continuous_usage else None
        chunks = [self._chunk(choice, usage) for choice in choices]
        if not isinstance(event, End):
            return chunks
        if self._spec.include_usage:
            chunks.append(_encode({**self._head(True), "choices": [], "usage": self._usage(event)}))
        if (valid := validity(event)) and chunks:
            chunks[-1] = chunks[-1][:-1] + b"," + _encode(valid)[1:]
        return [*chunks, DONE]

    def build_response(self, events: Sequence[AnswerEvent]) -> dict[str, Any]:
        (end,) = (event for event in events if isinstance(event, End))
        reasons: dict[int, FinishReason] = {
            event.index: event.finish_reason for event in events if isinstance(event, Finished)
        }
        choices = []
        for index in range(self._spec.answers):
            parts = [event for event in events if isinstance(event, Tokens) and event.index == index]
            choices.append(self._choice(index, parts, reasons.get(index, end.finish_reason)))
        self._reasoning_tokens = sum(event.reasoning_tokens for event in events if isinstance(event, Tokens))
        answer = {**self._head(False), "choices": choices, "usage": self._usage(end), **validity(end)}
        if self._spec.echoed_parameters.get("prompt_logprobs"):
            self._add_prompt_logprobs(answer, [event for event in events if isinstance(event, Tokens)])
        return answer

    def interrupt(self, code: str, usage: TokenCounts | None) -> list[bytes]:
        if not (self._spec.include_usage or self._spec.continuous_usage):
            return []
        if usage is None:
            usage = usage_so_far(self._spec, self._prompt, self._output_tokens)
        written = usage_object(usage, self._reasoning_tokens)
        return [_encode({**self._head(True), "choices": [], "usage": written})]

    def _speller(self, index: int) -> TokenSpeller:
        """Return the speller of a choice, which is at the choice's first token in the first call."""
        if index not in self._spellers:
            number = index // self._spec.n
            last = next(iter(self._spec.last_prompt_ids[number : number + 1]), None)
            self._spellers[index] = TokenSpeller(
                self._tokenizer,
                continues=self._tokenizer.is_continued([] if last is None else [last]),
                shows_special=self._spec.shows_special_tokens,
            )
        return self._spellers[index]

    def _count(self, event: Tokens) -> None:
        self._prompt = event.prompt or self._prompt
        self._output_tokens += len(event.token_ids)
        self._reasoning_tokens += event.reasoning_tokens

    def _usage(self, event: AnswerEvent) -> dict[str, Any]:
        so_far = usage_so_far(self._spec, self._prompt, self._output_tokens)
        end = event if isinstance(event, End) else None
        return usage_object(end.usage if end else so_far, self._reasoning_tokens, end)

    def _finish(self, index: int, reason: FinishReason) -> list[dict[str, Any]]:
        del self._unfinished[index]
        return self._last_deltas(index, reason)

    @abstractmethod
    def _add_prompt_logprobs(self, answer: dict[str, Any], parts: list[Tokens]) -> None:
        """Add the log-probabilities of the prompts' tokens to a complete response."""

    def _prompt_logprobs(self, parts: list[Tokens], index: int) -> list[dict[str, Any] | None]:
        """Return the log-probabilities of the prompt whose first completion has this index."""
        found = (part.prompt_logprobs for part in parts if part.index == index and part.prompt_logprobs is not None)
        return prompt_logprobs(self._tokenizer, next(found, []))

    @abstractmethod
    def _head(self, streamed: bool) -> dict[str, Any]:
        """Return the fields before `choices`."""

    @abstractmethod
    def _deltas(self, event: Tokens) -> list[dict[str, Any]]:
        """Return the streamed choices for new tokens of a completion."""

    @abstractmethod
    def _last_deltas(self, index: int, reason: FinishReason) -> list[dict[str, Any]]:
        """Return the streamed choices for the end of a completion."""

    @abstractmethod
    def _choice(self, index: int, parts: list[Tokens], reason: FinishReason) -> dict[str, Any]:
        """Return a choice of a complete response."""

    def _chunk(self, choice: dict[str, Any], usage: dict[str, Any] | None) -> bytes:
        chunk = {**self._head(True), "choices": [choice]}
        if self._spec.include_usage or usage is not None:
            chunk["usage"] = usage
        return _encode(chunk)


class ChatWriter(OpenAIWriter):
    def __init__(self, spec: ResponseSpec, tokenizer: Tokenizer) -> None:
        super().__init__(spec, tokenizer)
        self._opened: set[int] = set()
        self._is_legacy = bool(spec.echoed_parameters.get("functions"))  # answers use `function_call`
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # choice -> the chunk of a text, before and after the text
        indexes = range(spec.answers if spec.tools else 0)
        self._parsers = {index: parser_of(spec) for index in indexes}

    def stream(self, event: AnswerEvent) -> list[bytes]:
        if not isinstance(event, Tokens) or event.reasoning or event.logprobs or not event.text:
            return super().stream(event)
        if event.index not in self._opened:
            return super().stream(event)
        frame = self._frames.get(event.index) or self._make_frame(event.index)
        if frame is None:
            return super().stream(event)
        self._count(event)
        return [frame[0] + _encode(event.text) + frame[1]]

    def _make_frame(self, index: int) -> tuple[bytes, bytes] | None:
        """Return what surrounds the text in a choice's chunks; None if the chunks also differ in other fields."""
        if index in self._parsers or self._spec.continuous_usage:
            return None
        start, _, end = self._chunk(_build_choice(index, {"content": ""}), None).rpartition(b'""')
        self._frames[index] = start, end
        return start, end

    def _head(self, streamed: bool) -> dict[str, Any]:
        spec = self._spec
        return {
            "id": f"chatcmpl-{spec.request_id.removeprefix('req_')}",
            "object": "chat.completion.chunk" if streamed else "chat.completion",
            "created": spec.created,
            "model": spec.model,
            "service_tier": TIERS.get(spec.service_class, "default"),
        }

    def _add_prompt_logprobs(self, answer: dict[str, Any], parts: list[Tokens]) -> None:
        answer["prompt_logprobs"] = self._prompt_logprobs(parts, 0)

    def _deltas(self, event: Tokens) -> list[dict[str, Any]]:
        index = event.index
        deltas = self._opening(index)
        if event.reasoning:
            deltas.append({"reasoning_content": event.reasoning})
        deltas += self._parse_tokens(event)
        logprobs = _answer_logprobs(event)
        if logprobs and (not deltas or "reasoning_content" in deltas[-1]):
            deltas.append({"content": ""})  # the text of these tokens is still pending
        choices = [_build_choice(index, delta) for delta in deltas]
        if logprobs:
            choices[-1]["logprobs"] = chat_logprobs(self._speller(index), logprobs)
        return choices

    def _opening(self, index: int) -> list[dict[str, Any]]:
        if index in self._opened:
            return []
        self._opened.add(index)
        return [{"role": "assistant", "content": ""}]

    def _parse_tokens(self, event: Tokens) -> list[dict[str, Any]]:
        index, text = event.index, event.text
        if index not in self._parsers:
            return [{"content": text}] if text else []
        return [self._delta(index, piece) for piece in self._parsers[index].read(event)]

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, AnswerText):
            return {"content": piece.text}
        if self._is_legacy:
            call = {"name": piece.name, "arguments": ""} if isinstance(piece, CallStart) else {"arguments": piece.text}
            return {"function_call": call}
        if isinstance(piece, CallStart):
            return {"tool_calls": [{"index": piece.number, **self._call(index, piece, "")}]}
        return {"tool_calls": [{"index": piece.number, "function": {"arguments": piece.text}}]}

    def _call(self, index: int, call: CallStart, arguments: str) -> dict[str, Any]:
        name = call_id(self._spec.request_id, index, call.number)
        return {"id": name, "type": "function", "function": {"name": call.name, "arguments": arguments}}

    def _last_deltas(self, index: int, reason: FinishReason) -> list[dict[str, Any]]:
        deltas = self._opening(index)
        parser = self._parsers.get(index)
        if parser is not None:
            deltas += [self._delta(index, piece) for piece in parser.close(is_truncated=reason == "length")]
        choices = [_build_choice(index, delta) for delta in deltas]
        return [*choices, _build_choice(index, {}, self._reason(reason, bool(parser and parser.calls)))]

    def _choice(self, index: int, parts: list[Tokens], reason: FinishReason) -> dict[str, Any]:
        text = "".join(part.text for part in parts)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if reasoning := "".join(part.reasoning for part in parts):
            message["reasoning_content"] = reasoning
        calls: list[dict[str, Any]] = []
        if parser := self._parsers.get(index):
            pieces = [*parser.read(*parts), *parser.close(is_truncated=reason == "length")]
            arguments = _arguments(pieces)
            calls = [
                self._call(index, piece, arguments.get(piece.number, ""))
                for piece in pieces
                if isinstance(piece, CallStart)
            ]
            message["content"] = "".join(piece.text for piece in pieces if isinstance(piece, AnswerText))
        if calls:
            made = {"function_call": calls[0]["function"]} if self._is_legacy else {"tool_calls": calls}
            message |= {"content": message["content"] or None, **made}
        logprobs = _all_logprobs(parts)
        return {
            "index": index,
            "message": message,
            "logprobs": None if logprobs is None else chat_logprobs(self._speller(index), logprobs),
            "finish_reason": self._reason(reason, bool(calls)),
        }

    def _reason(self, reason: FinishReason, calls: bool) -> str:
        return ("function_call" if self._is_legacy else "tool_calls") if calls and reason == "stop" else reason


class CompletionWriter(OpenAIWriter):
    def __init__(self, spec: ResponseSpec, tokenizer: Tokenizer) -> None:
        super().__init__(spec, tokenizer)
        self._begun: set[int] = set()  # choices whose first text was written

    def _head(self, streamed: bool) -> dict[str, Any]:
        spec = self._spec
        return {
            "id": f"cmpl-{spec.request_id.removeprefix('req_')}",
            "object": "text_completion",
            "created": spec.created,
            "model": spec.model,
        }

    def _add_prompt_logprobs(self, answer: dict[str, Any], parts: list[Tokens]) -> None:
        n = self._spec.n
        found = [self._prompt_logprobs(parts, number * n) for number in range(self._spec.prompts)]
        for choice in answer["choices"]:
            choice["prompt_logprobs"] = found[choice["index"] // n]

    def _deltas(self, event: Tokens) -> list[dict[str, Any]]:
        has_echo = bool(self._spec.echo) and event.index not in self._begun
        if not has_echo and (self._spec.hides_output or not (event.text or event.logprobs)):
            return []
        return [self._text(event.index, [event], None)]

    def _last_deltas(self, index: int, reason: FinishReason) -> list[dict[str, Any]]:
        return [self._text(index, [], reason)]

    def _choice(self, index: int, parts: list[Tokens], reason: FinishReason) -> dict[str, Any]:
        return self._text(index, parts, reason)

    def _text(self, index: int, parts: list[Tokens], reason: FinishReason | None) -> dict[str, Any]:
        text = "".join(part.text for part in parts)
        logprobs: dict[str, Any] | None = None
        items: Sequence[TokenLogprobs | int] | None = _all_logprobs(parts)
        if self._spec.hides_output:
            text, items = "", None if items is None else []
            reason = None if reason is None else "length"
        is_first = index not in self._begun
        self._begun.add(index)
        prompt = self._spec.echo[index // self._spec.n] if self._spec.echo and is_first else []
        echo = self._tokenizer.decode(prompt, skip_special_tokens=not self._spec.shows_special_tokens) if prompt else ""
        if items is not None:
            logprobs = self._echoed_logprobs(index, prompt, len(echo), parts) if prompt else {}
            for name, values in completion_logprobs(self._speller(index), items).items():
                logprobs[name] = logprobs.get(name, []) + values
        return {"index": index, "text": echo + text, "logprobs": logprobs, "finish_reason": reason}

    def _echoed_logprobs(self, index: int, prompt: list[int], length: int, parts: list[Tokens]) -> dict[str, Any]:
        """Return the logprobs of an echoed prompt, and continue at its end. `length` is that of its text."""
        speller = self._speller(index)
        speller.begin(0, continues=False)
        found = completion_logprobs(speller, [prompt[0], *(parts[0].prompt_logprobs or ())])
        speller.begin(length, continues=self._tokenizer.is_continued(prompt))
        return found


def _build_choice(index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _arguments(pieces: list[Piece]) -> dict[int, str]:
    """Return the arguments of each call by its number."""
    parts: defaultdict[int, list[str]] = defaultdict(list)
    for piece in pieces:
        if isinstance(piece, CallArguments):
            parts[piece.number].append(piece.text)
    return {number: "".join(texts) for number, texts in parts.items()}


def _answer_logprobs(event: Tokens) -> list[TokenLogprobs]:
    """Return the logprobs of the event's tokens after the reasoning."""
    return (event.logprobs or [])[event.reasoning_tokens :]


def _all_logprobs(parts: list[Tokens]) -> list[TokenLogprobs] | None:
    """Return the logprobs of all tokens, or None if they were not requested."""
    part_logprobs = [_answer_logprobs(part) for part in parts if part.logprobs is not None]
    return [token for logprobs in part_logprobs for token in logprobs] if part_logprobs else None
