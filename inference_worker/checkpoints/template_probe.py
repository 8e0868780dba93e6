"""The conversations that a chat template refuses although the API allows them, and the adaptation of messages to it.

A template is probed once with a fixed set of conversations. A conversation is refused if the template fails on it, or
if a part of it is not in the prompt. Messages are changed only for a template that refuses them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from inference_worker.checkpoints.chat_template import ChatTemplate, ChatTemplateError
from inference_worker.checkpoints.template_work import WorkBudget

PROBE_UNITS = 100_000  # work of one probe: about 10 ms
SHORT_ID_LENGTH = 9
_Message = dict[str, Any]


class TemplateTraits(msgspec.Struct, frozen=True):
    """The forms of conversations that a chat template takes and refuses."""

    parts: bool = False  # it takes contents only as lists of parts
    refuses_system: bool = False
    refuses_later_system: bool = False  # it takes a system message only as the first one
    refuses_consecutive: bool = False  # it takes no two turns of one role in a row
    refuses_user_after_result: bool = False  # it takes no turn of the user directly after a tool's result
    renders_calls: bool = False  # calls and results are in the prompt, whether or not it takes tools
    short_ids: bool = False  # it takes IDs of calls only with SHORT_ID_LENGTH characters
    text_arguments: bool = False  # it takes arguments only as JSON text
    object_arguments: bool = False  # it takes arguments only as an object

    @property
    def adaptations(self) -> list[str]:
        """Return the changes of messages for this template, in words."""
        words = {
            "parts": "contents as lists of parts",
            "refuses_system": "system text in the first user turn",
            "refuses_later_system": "later system text in user turns",
            "refuses_consecutive": "consecutive turns merged",
            "refuses_user_after_result": "an empty answer before a user turn after a tool result",
            "short_ids": f"call IDs of {SHORT_ID_LENGTH} characters",
            "text_arguments": "arguments as JSON text",
            "object_arguments": "arguments as objects",
        }
        return [text for name, text in words.items() if getattr(self, name)]


def probe_template(template: ChatTemplate) -> TemplateTraits:
    """Return what the template takes and refuses. Its work is limited to about 0.2 s."""
    return _Probe(template).traits()


class _Probe:
    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._traits = TemplateTraits()

    def traits(self) -> TemplateTraits:
        if not self._takes(_USER):
            self._set(parts=True)
            if not self._takes(_USER):
                return TemplateTraits()  # it renders no conversation
        if not self._takes(_SYSTEM, _USER):
            self._set(refuses_system=True, refuses_later_system=True)
        elif not self._takes(_USER, _ANSWER, _SYSTEM, _NEXT):
            self._set(refuses_later_system=True)
        if not self._takes(_USER, _NEXT) or not self._takes(_USER, _ANSWER, _SECOND_ANSWER):
            self._set(refuses_consecutive=True)
        self._probe_calls()
        return self._traits

    def _probe_calls(self) -> None:
        for options in ({}, {"short_ids": True}, {"text_arguments": True}, {"short_ids": True, "text_arguments": True}):
            before = self._traits
            self._set(**options)
            if self._takes(_USER, _call(), _RESULT, _ANSWER):
                break
            self._traits = before
        else:
            return
        self._set(renders_calls=True)
        if not self._traits.text_arguments and not self._takes(_USER, _call("QUARTZ"), _RESULT, _ANSWER):
            self._set(object_arguments=True)
        if not self._takes(_USER, _call(), _RESULT, _NEXT):
            self._set(refuses_user_after_result=True)
            if not self._takes(_USER, _call(), _RESULT, _NEXT):
                self._set(refuses_user_after_result=False)

    def _set(self, **fields: bool) -> None:
        self._traits = msgspec.structs.replace(self._traits, **fields)

    def _takes(self, *messages: _Message) -> bool:
        """Return whether the template renders each part of the messages, adapted to what is known of it."""
        try:
            text = self._template.render(
                adapt_messages(messages, self._traits), None, True, budget=WorkBudget(PROBE_UNITS)
            )
        except ChatTemplateError:
            return False
        return all(word in text for message in messages for word in _words(message))


_USER: _Message = {"role": "user", "content": "AMBER"}
_NEXT: _Message = {"role": "user", "content": "BASALT"}
_SYSTEM: _Message = {"role": "system", "content": "COBALT"}
_ANSWER: _Message = {"role": "assistant", "content": "DOLOMITE"}
_SECOND_ANSWER: _Message = {"role": "assistant", "content": "EMERALD"}
_CALL_ID = "call_0123456789abcdef"
_RESULT: _Message = {"role": "tool", "content": "FLINT", "tool_call_id": _CALL_ID, "name": "GARNET"}


def _call(arguments: Any = None) -> _Message:
    function = {"name": "GARNET", "arguments": {"JASPER": "ONYX"} if arguments is None else arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": _CALL_ID, "type": "function", "function": function}],
    }


def _words(message: _Message) -> list[str]:
    words = [message["content"]]
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        words += ["JASPER", "ONYX"] if isinstance(arguments, dict) else [arguments]
    return words


def adapt_messages(messages: Sequence[_Message], traits: TemplateTraits) -> list[_Message]:
    """Return the messages in a form that a template with these traits takes."""
    adapted = list(messages)
    if traits.refuses_system or traits.refuses_later_system:
        adapted = _move_system(adapted, traits)
    if traits.refuses_consecutive:
        adapted = _merge_turns(adapted)
    if traits.refuses_user_after_result:
        adapted = _answer_results(adapted)
    if traits.short_ids or traits.text_arguments or traits.object_arguments:
        adapted = _rewrite_calls(adapted, traits)
    if traits.parts:
        adapted = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in adapted]
    return adapted


def _move_system(messages: list[_Message], traits: TemplateTraits) -> list[_Message]:
    """Return the messages with system texts in the next turn of the user, or in one of their own before an answer."""
    moved: list[_Message] = []
    waiting: list[str] = []
    for number, message in enumerate(messages):
        if message["role"] == "system" and not (number == 0 and not traits.refuses_system):
            waiting.append(message["content"])
            continue
        if waiting and message["role"] == "user":
            message = {**message, "content": _join(*waiting, message["content"])}
            waiting = []
        elif waiting and message["role"] == "assistant":
            moved.append({"role": "user", "content": _join(*waiting)})
            waiting = []
        moved.append(message)
    if waiting:
        moved.append({"role": "user", "content": _join(*waiting)})
    return moved


def _merge_turns(messages: list[_Message]) -> list[_Message]:
    """Return the messages with turns of one role in a row as one. Results of tools stay apart."""
    merged: list[_Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        if last is None or message["role"] != last["role"] or message["role"] == "tool":
            merged.append(message)
            continue
        both = {**last, **message, "content": _join(last["content"], message["content"])}
        if calls := [*last.get("tool_calls", ()), *message.get("tool_calls", ())]:
            both["tool_calls"] = calls
        merged[-1] = both
    return merged


def _answer_results(messages: list[_Message]) -> list[_Message]:
    """Return the messages with an empty answer between a tool's result and a turn of the user."""
    answered: list[_Message] = []
    for message in messages:
        if answered and answered[-1]["role"] == "tool" and message["role"] == "user":
            answered.append({"role": "assistant", "content": ""})
        answered.append(message)
    return answered


def _rewrite_calls(messages: list[_Message], traits: TemplateTraits) -> list[_Message]:
    """Return the messages with IDs and arguments of calls in the template's form."""
    rewritten = []
    for message in messages:
        changed = dict(message)
        if "tool_calls" in message:
            changed["tool_calls"] = [_rewrite_call(call, traits) for call in message["tool_calls"]]
        if traits.short_ids and "tool_call_id" in message:
            changed["tool_call_id"] = _short_id(message["tool_call_id"])
        rewritten.append(changed)
    return rewritten


def _rewrite_call(call: Mapping[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function["arguments"]
    if traits.text_arguments and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    elif traits.object_arguments and isinstance(arguments, str):
        function["arguments"] = {"arguments": arguments}
    changed = {**call, "function": function}
    if traits.short_ids:
        changed["id"] = _short_id(call["id"])
    return changed


def _short_id(call_id: str) -> str:
    """Return an ID of SHORT_ID_LENGTH letters and digits, which depends only on the ID. IDs of that form are kept."""
    if len(call_id) == SHORT_ID_LENGTH and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:SHORT_ID_LENGTH]


def _join(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)
