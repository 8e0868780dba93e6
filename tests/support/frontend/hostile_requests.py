"""Requests with texts that no browser sends, in every parameter and field that a view reads.

A first request records the names that the view reads from the query string, the form or the JSON body. Then each name
gets each of VALUES. Every request is undone, so that a submitted form changes nothing for the next ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock
from urllib.parse import quote_from_bytes

from tests.support.downloads import read_download

if TYPE_CHECKING:
    from django.test import Client

LONG = 64 * 1024
# In UTF-8, with bytes that are none.
VALUES = {
    "NUL": b"a\0b",
    "surrogate": b"a\xed\xa0\x80b",
    "byte": b"a\xffb",
    "text": b"x" * LONG,
    "digits": b"9" * LONG,
    "JSON": rb'{"models": ["a\u0000b", "\ud800"], "rules": [{"name": "\u0000"}]}',
    "superscript": "²".encode(),
    "exponent": b"1e99999",
    "bigint": b"99999999999999999999",
    "first day": b"0001-01-01",
    "last day": b"9999-12-31",
    "first time": b"0001-01-01T00:00:00+12:00",
    "last time": b"9999-12-31T23:59:59-12:00",
}


class _RecordedDict(dict[str, Any]):
    """A dict that records which keys are read."""

    def __init__(self, data: Any, names: set[str]) -> None:
        super().__init__(data)
        self._names = names

    def get(self, key: str, default: Any = None) -> Any:
        self._names.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self._names.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._names.add(str(key))
        return super().__contains__(key)


@contextmanager
def recorded_names() -> Iterator[set[str]]:
    """Yield the names that views read from query strings, forms and JSON objects."""
    from django.http import QueryDict  # here: Django is not set up on import
    from django.utils.datastructures import MultiValueDict
    from rest_framework.parsers import JSONParser

    names: set[str] = set()

    def recording(method: Any) -> Any:
        def read(self: Any, key: str, *args: Any, **fields: Any) -> Any:
            if isinstance(self, QueryDict):
                names.add(key)
            return method(self, key, *args, **fields)

        return read

    def as_dict(self: Any) -> dict[str, Any]:
        return _RecordedDict({key: value for key, value in self.items()}, names)

    parse = JSONParser.parse

    def parsed(self: Any, *args: Any, **fields: Any) -> Any:
        data = parse(self, *args, **fields)
        return _RecordedDict(data, names) if isinstance(data, dict) else data

    with (
        mock.patch.object(MultiValueDict, "__getitem__", recording(MultiValueDict.__getitem__)),
        mock.patch.object(MultiValueDict, "get", recording(MultiValueDict.get)),
        mock.patch.object(MultiValueDict, "getlist", recording(MultiValueDict.getlist)),
        mock.patch.object(QueryDict, "__contains__", recording(dict.__contains__), create=True),
        mock.patch.object(MultiValueDict, "dict", as_dict),
        mock.patch.object(JSONParser, "parse", parsed),
    ):
        yield names


@contextmanager
def undone() -> Iterator[None]:
    """Undo all changes of the database after the block, also those of transactions that must be the outermost ones."""
    from django.db import transaction  # here: Django is not set up on import

    atomic = transaction.atomic()
    atomic._from_testcase = True  # type: ignore[attr-defined]
    with atomic:
        try:
            yield
        finally:
            transaction.set_rollback(True)


class Walker:
    """One user's requests. `sent` is the number of requests, `failures` describes the responses of 500 and above."""

    def __init__(self, who: str, client: Client) -> None:
        self.who = who
        self.sent = 0
        self.failures: list[str] = []
        self._client = client
        client.raise_request_exception = False

    def send(
        self,
        method: str,
        path: str,
        query: str = "",
        body: str = "",
        *,
        is_json: bool,
        label: str = "",
        **environ: str,
    ) -> Any:
        """Send a request with an encoded query string or body, and undo it."""
        cookies = self._client.cookies.copy()
        content_type = "application/json" if is_json else "application/x-www-form-urlencoded"
        with undone():
            response = self._client.generic(method, path, body, content_type, **({"QUERY_STRING": query} | environ))
            if response.streaming:
                read_download(response)
        self._client.cookies = cookies
        self.sent += 1
        if response.status_code >= 500:
            cause = getattr(response, "exc_info", None)
            reason = f"{cause[0].__name__}: {str(cause[1])[:100]}" if cause else ""
            self.failures.append(f"{self.who}: {method} {path[:120]} {label} {response.status_code} {reason}")
        return response

    def check(self, *, at_least: int) -> None:
        """Fail if a request failed since the last check, or if fewer requests than this were sent."""
        failures, self.failures = self.failures, []
        sent, self.sent = self.sent, 0
        assert not failures, "\n".join(failures)
        assert sent >= at_least

    def names_read(self, method: str, path: str, *, is_json: bool) -> list[str]:
        """Send a request without parameters. Return the names that the view looked for."""
        with recorded_names() as names:
            self.send(method, path, body="{}" if is_json and method != "GET" else "", is_json=is_json)
        return sorted(name for name in names if name != "csrfmiddlewaretoken")

    def attack(self, method: str, path: str, names: Sequence[str], value: str, *, is_json: bool) -> None:
        """Send one request in which all of these names have this value."""
        label = f"{', '.join(names)} = {value}"
        if is_json and method != "GET":
            text = VALUES[value].decode("utf-8", "surrogatepass" if value == "surrogate" else "replace")
            self.send(method, path, body=json.dumps(dict.fromkeys(names, text)), is_json=True, label=label)
            return
        encoded = "&".join(f"{quote_from_bytes(name.encode())}={quote_from_bytes(VALUES[value])}" for name in names)
        where = {"query": encoded} if method == "GET" else {"body": encoded}
        self.send(method, path, **where, is_json=is_json, label=label)
