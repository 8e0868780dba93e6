"""URLs to which secrets are sent."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from inference_worker.contract import env


def is_secure_url(url: str) -> bool:
    """Return whether no network can read what is sent to the URL: https://, or http:// on a loopback address."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        _ = parts.port  # raises ValueError if it is not a port number
    except ValueError:
        return False
    if parts.scheme != "http" or host == "localhost":
        return parts.scheme in ("http", "https") and bool(host)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def issuer_url(text: str) -> str:
    """Check the URL of an OpenID Connect provider. Return it without a trailing slash."""
    url = env.url("http", "https")(text).rstrip("/")
    if not is_secure_url(url):
        raise ValueError("must start with https://, or with http:// and a loopback address: the client secret is sent")
    if re.search(r"[?#@]|/\.well-known/", url):
        raise ValueError("must have no user name, no query and no /.well-known/openid-configuration")
    return url
