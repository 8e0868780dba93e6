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
# Names and codes in the test's data, the text of an invoice, which is a document, and an error of the inference API.
NAMES = re.compile(
    r"All of it|On trial|On call|8 bits for the chat of support|a new kernel is tried|draft of mine"
    r"|The price of output was wrong|Not subject to tax\.|The model does not exist\.|auto, none oder|^none$|Mit yes in"
    r"|^{.*"
)
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
    return [
        text
        for text in dict.fromkeys(parser.texts)
        if set(re.findall(r"[\w'’/.-]+", NAMES.sub("", text).lower())) & ENGLISH
    ]


def test_english_texts_are_found() -> None:
    page = """<title>All of it</title><p title="Open the page">Alle <b>Seiten</b></p><code>is the code</code>
        <p>Es <br>is reached.</p><a aria-label="Kosten">on-premise</a>"""
    assert english_texts(page) == ["Open the page", "is reached."]


@pytest.mark.parametrize("who", ["visitor", "owner", "operator"])
def test_no_page_has_an_english_word(world: World, who: str) -> None:
    from django.test import Client  # here: Django is not set up on import

    walker = Walker(who, Client() if who == "visitor" else logged_in(world, who))
    found, pages = [], 0
    for route in ROUTES:
        if route.is_on_page or (who == "operator") != route.pattern.startswith("operator/"):
            continue
        path = route.address(world, "populated")
        for method in ("GET",) if route.panel else ("GET", "POST"):
            response = walker.send(method, path, is_json=False, HTTP_ACCEPT_LANGUAGE="de")
            if response.get("content-type", "").startswith("text/html") and response.status_code != 302:
                pages += 1
                found += [f"{method} {path}: {text}" for text in english_texts(response.content.decode())]
    assert not found, "\n".join(found)
    assert pages > 20
