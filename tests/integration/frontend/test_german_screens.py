"""Every page of the console in German has no English word: neither its texts nor the errors of its forms."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from tests.support.frontend.console import World
from tests.support.frontend.hostile_requests import Walker
from tests.support.frontend.pages import logged_in
from tests.support.frontend.routes import all_routes

ROUTES = [route for route in all_routes() if not route.is_api and not route.pattern.startswith(("admin/", "v1/"))]
# Words of English sentences that are neither German words nor parts of names.
ENGLISH = {
    *("the", "and", "of", "is", "are", "were", "been", "has", "have", "had", "not", "for", "from", "with", "to", "or"),
    *("your", "you", "by", "each", "their", "its", "which", "that", "this", "than", "then", "when", "until", "after"),
    *("before", "all", "on", "at", "as", "be", "will", "can", "yes", "none", "only", "no"),
}
HIDDEN = ("code", "kbd", "pre", "script", "style", "textarea", "title")
SHOWN_ATTRIBUTES = ("aria-label", "title", "placeholder", "alt")


class VisibleTexts(HTMLParser):
    """The texts of a page that a user sees or hears, without code and what users typed."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._hidden: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.texts += [value for name, value in attrs if name in SHOWN_ATTRIBUTES and value]
        if tag in HIDDEN or any(name == "translate" and value == "no" for name, value in attrs):
            self._hidden.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._hidden and tag == self._hidden[-1]:
            self._hidden.pop()

    def handle_data(self, data: str) -> None:
        if not self._hidden and data.strip():
            self.texts.append(" ".join(data.split()))


def english_texts(page: str) -> list[str]:
    """Return the texts with a word of an English sentence."""
    parser = VisibleTexts()
    parser.feed(page)
    return [text for text in dict.fromkeys(parser.texts) if set(re.findall(r"[a-z'’/._-]+", text)) & ENGLISH]


def test_english_texts_are_found() -> None:
    page = """<title>All of it</title><p title="Open the page">Alle <b>Seiten</b></p><code>is the code</code>
        <p>The limit<br>is reached.</p><a aria-label="Kosten">on-premise</a>"""
    assert english_texts(page) == ["Open the page", "is reached."]


@pytest.mark.parametrize("who", ["visitor", "owner", "operator"])
def test_no_page_has_an_english_word(world: World, who: str) -> None:
    from django.test import Client  # here: Django is not set up on import

    walker = Walker(who, Client() if who == "visitor" else logged_in(world, who))
    found: dict[str, list[str]] = {}
    pages = 0
    for route in ROUTES:
        path = route.address(world, "populated")
        for method in ("GET", "POST"):
            response = walker.send(method, path, is_json=False, HTTP_ACCEPT_LANGUAGE="de")
            if response.get("content-type", "").startswith("text/html") and response.status_code != 302:
                pages += 1
                if texts := english_texts(response.content.decode()):
                    found[f"{method} {path}"] = texts
    assert found == {}
    assert pages > 20
