"""Calls of Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and `[TOOL_CALLS]name[ARGS]{…}` since 2025."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from millrace.gateway.protocols.tool_parsers.base import MAX_SPACE, SPACE, BraceCounter, Piece, Scanner
from millrace.gateway.protocols.tool_parsers.json_calls import JsonCallParser

_S = rf"[ \t\r\n]{{0,{MAX_SPACE}}}"
_NAME = re.compile(rf"([A-Za-z0-9_-]+)(?:\[CALL_ID\][A-Za-z0-9]*)?(?:\[ARGS\])?{_S}(?=\{{)")
_NAME_START = re.compile(rf"[A-Za-z0-9_-]*(?:\[[A-Z_]{{0,7}}(?:\][A-Za-z0-9]*(?:\[[A-Z]{{0,4}}\]?)?)?)?{_S}")
_MAX_HEAD = 256  # characters of a name with its marks


class MistralParser(JsonCallParser):
    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names, ["[TOOL_CALLS]"])
        self._is_named = False  # the current call is a name and its arguments

    def _in_call(self, pieces: list[Piece]) -> bool:
        text = self._pending.lstrip(SPACE)
        if self._is_unmarked or not text or text[0] in "[{" or len(self._pending) - len(text) > 2 * MAX_SPACE:
            return super()._in_call(pieces)
        match = _NAME.match(text)
        if match is not None and match.group(1) in self._names:
            self._start_call(pieces, match.group(1))
            self._pending, self._state, self._braces = text[match.end() :], self._in_arguments, BraceCounter()
            self._is_named = True
            return True
        if match is not None and self.calls:  # a call of an unknown tool is dropped
            self._space, self._pending, self._state = "", text[match.end() :], self._in_object
            self._scanner = Scanner("}", "{}", '"', at=1)
            return True
        if match is None and len(text) <= _MAX_HEAD and _NAME_START.fullmatch(text):
            return False
        self._leave_as_text(pieces)
        return True

    def _after_arguments(self, pieces: list[Piece]) -> bool:
        if not self._is_named:
            return super()._after_arguments(pieces)
        self._is_named = False
        self._leave_calls()
        return True

    def _close_call(self, pieces: list[Piece], is_truncated: bool) -> None:
        text = self._pending.strip(SPACE)
        if is_truncated and self._state == self._in_call and text and text[0] not in "[{":
            # The beginning of a tool's name is a truncated call. Other text is text.
            name = re.split(r"[\[\s]", text, maxsplit=1)[0]
            if not any(json.dumps(each)[1:-1].startswith(name) for each in self._names):
                self._leave_as_text(pieces, self._pending)
            return
        super()._close_call(pieces, is_truncated)
