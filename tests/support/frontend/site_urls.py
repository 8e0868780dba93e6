"""Spellings of URLs in `?next=`, and a model of the most lenient browser that follows them."""

from __future__ import annotations

import re
from urllib.parse import unquote

HOST = "evil.test"
_PREFIXES = (
    *(
        "//",
        "///",
        "////",
        "/\\",
        "\\\\",
        "\\/",
        "\\",
        "/%5c",
        "/%5C",
        "%5c%5c",
        "/%5c%5c",
        "/%2f",
        "/%2F%2F",
        "%2f%2f",
    ),
    *("//%5c", "/./", "/.//", "/..//", "/../", "/../..//", "/a/..//", "/t/acme/..//..//", "/%2e%2e//", "/%2e%2e%2f%2f"),
    *("/..%2f%2f", "/.%5c", "/%2e%5c", "/%252f", "/%255c", "/%25252f", "/%2525252525252f", "/a/../%5c", "/a//../"),
    *("/\t/", "/\n/", "/\r\n/", "/\x00/", "/ /", "/%09/", "/%0a/", "/%0d%0a/", "/%00/", "/%20/", "/\x0b/", "/\x7f/"),
    *("\t//", "\n//", " //", "\x00//", "\x01//", "\x1f//", "\xa0//", "\x85//", "\u2028//", "\ufeff//", "/\u2028/"),
    *("http://", "https://", "HTTPS://", "http:", "http:/", "http:///", "https:\\\\", "http:\\", "ftp://", "ws://"),
    *("http://testserver@", "https://testserver@", "//testserver@", "//testserver:80@", "http://testserver:x@"),
    *("http://testserver.", "//testserver.", "http://testserver\\@", "http://testserver%2f@", "http://testserver#@"),
    *("http://testserver\\.", "http://testserver:80\\@", "http://[::1]@", "//[", "http:\t//", "h\tttp://", "ht\ntp://"),
    *("javascript:alert(1)//", "JavaScript:alert(1)//", "java\tscript:alert(1)//", "\x01javascript:alert(1)//"),
    *("data:text/html,", "vbscript:", "blob:", "file:///", "mailto:a@", "javascript://testserver/%0aalert(1)//", ""),
    *("t/acme/..//", "./", "../", "?next=//", "#//", ";//", "@", ":80//", "*"),
)
OTHER_SITES = [f"{prefix}{HOST}{suffix}" for prefix in _PREFIXES for suffix in ("", "/x?y=/t/acme/")]
THIS_SITE = [
    *("/", "/account/", "/t/acme/?range=7d", "/t/acme/requests/?key=1&q=a%2Fb#row-1", "/t/acme/models/org%2Fmodel"),
    *(
        "/t/acme/..a/",
        "/t/acme/.a/",
        "/login?next=//evil.test",
        "/t/acme/?q=%5C%5Cevil.test",
        "/t/acme/?q=\\x",
        "/t/é/",
    ),
    *("/t/acme/%C3%A9", "/t/acme/100%25", "/t/acme/?q=../../x", "/t/acme/?q=%09", "/t/acme/a.b/@c:d;e=f/"),
]
LONG = "/" + "a" * 2048


def leaves_site(location: str, origin: str = "http://testserver") -> bool:
    """Return whether the most lenient browser would leave the site.

    It decodes the path, drops control characters and removes dot segments before it looks for a host.
    """
    url = re.sub(r"[\x00-\x20\x7f-\xa0\u2028\u2029\ufeff]", "", re.sub(rf"^{origin}(?=[/?#]|$)", "", location))
    url = re.split(r"[?#]", url, maxsplit=1)[0]
    for _ in range(8):
        url = re.sub(r"[\x00-\x20\x7f-\xa0\u2028\u2029\ufeff]", "", unquote(url)).replace("\\", "/")
    while (shorter := re.sub(r"(^|/[^/]*)/\.\.(?=/|$)|/\.(?=/|$)", "", url, count=1)) != url:
        url = shorter
    return url.startswith("//") or re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:", url) is not None
