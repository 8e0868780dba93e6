"""URLs from requests that redirects may lead to."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import RequestFactory
from hypothesis import given
from hypothesis import strategies as st

from tenants.site_urls import is_site_url, site_url_in_header
from tests.support.frontend.site_urls import LONG, OTHER_SITES, THIS_SITE, leaves_site

ORIGIN = "http://testserver"
PIECES = st.sampled_from(
    [
        *("/", "\\", ".", "..", "%2f", "%5c", "%2e", "%25", "%09", "%00", "\t", "\n", "\x00", " ", "@", ":", "?", "#"),
        *("a", "evil.test", "testserver", "http:", "javascript:", "\u2028", "\ufeff"),
    ]
)


def header(url: str, **options: Any) -> str | None:
    return site_url_in_header(RequestFactory(headers={"referer": url}).get("/"), "Referer", **options)


@pytest.mark.parametrize("url", [*OTHER_SITES, LONG, "", "/\ud800"], ids=ascii)
def test_urls_of_other_sites_are_refused(url: str) -> None:
    assert not is_site_url(url)
    assert header(ORIGIN + url) is None
    assert not leaves_site(header(f"https://inner{url}", any_host=True) or "/")


def test_most_of_these_urls_leave_the_site_in_some_browser() -> None:
    assert sum(map(leaves_site, OTHER_SITES)) > 0.8 * len(OTHER_SITES)


@pytest.mark.parametrize("url", THIS_SITE, ids=ascii)
def test_urls_of_this_site_are_accepted(url: str) -> None:
    assert is_site_url(url)
    assert not leaves_site(url)
    assert header(ORIGIN + url) == url.partition("#")[0]
    assert header(f"https://testserver{url}") == url.partition("#")[0]
    assert header(f"http://elsewhere.test{url}") is None
    assert header(f"{ORIGIN}.evil.test{url}") is None
    assert header(f"{ORIGIN}:81{url}") is None
    assert header(f"https://inner:81{url}", any_host=True) == url.partition("#")[0]


@given(st.lists(PIECES, max_size=8).map("".join))
def test_no_accepted_url_leaves_the_site(text: str) -> None:
    for url in (text, f"/{text}"):
        assert not (is_site_url(url) and leaves_site(url)), url
