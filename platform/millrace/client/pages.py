"""Iterators over the rows of all pages of a list."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qs, urlsplit

from millrace.client.http import AsyncHttp, Http

T = TypeVar("T")


class _Pages:
    """The position in a list. Only the cursor of a page's link is used, so that no credentials go to another host."""

    def __init__(self, path: str, query: Mapping[str, Any] | None) -> None:
        self.path = path
        self._query = dict(query or {})
        self._cursor: str | None = None
        self.is_done = False

    @property
    def query(self) -> dict[str, Any]:
        return self._query if self._cursor is None else {**self._query, "cursor": self._cursor}

    def rows_of(self, page: Any) -> list[Any]:
        """Return the rows of a page and continue at the next one."""
        cursors = parse_qs(urlsplit(page.get("next") or "").query).get("cursor")
        self._cursor = cursors[0] if cursors else None
        self.is_done = self._cursor is None
        return list(page["results"])


class Pager(Generic[T]):
    """The rows of a list. Iterating requests page after page; each iteration starts at the first page."""

    def __init__(self, http: Http, path: str, query: Mapping[str, Any] | None = None) -> None:
        self._http = http
        self._path = path
        self._query = query

    def pages(self) -> Iterator[list[T]]:
        """Yield the rows of each page."""
        pages = _Pages(self._path, self._query)
        while not pages.is_done:
            yield pages.rows_of(self._http.call("GET", pages.path, query=pages.query))

    def __iter__(self) -> Iterator[T]:
        for page in self.pages():
            yield from page


class AsyncPager(Generic[T]):
    """The rows of a list for `async for`, like those of `Pager`."""

    def __init__(self, http: AsyncHttp, path: str, query: Mapping[str, Any] | None = None) -> None:
        self._http = http
        self._path = path
        self._query = query

    async def pages(self) -> AsyncIterator[list[T]]:
        """Yield the rows of each page."""
        pages = _Pages(self._path, self._query)
        while not pages.is_done:
            yield pages.rows_of(await self._http.call("GET", pages.path, query=pages.query))

    async def __aiter__(self) -> AsyncIterator[T]:
        async for page in self.pages():
            for row in page:
                yield row
