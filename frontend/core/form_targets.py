"""Forms whose answer leads to another site."""

from __future__ import annotations

from typing import TypeVar

from django.conf import settings
from django.http.response import HttpResponseBase

R = TypeVar("R", bound=HttpResponseBase)


def allow_form_target(response: R, allowed: str) -> R:
    """Let the form of a page lead to other sites. Chromium applies `form-action` to the redirects of a form.

    Args:
        allowed: a source of the content security policy, such as `https:`.
    """
    policy = settings.SECURITY_HEADERS["Content-Security-Policy"]
    policy = policy.replace("form-action 'self'", f"form-action 'self' {allowed}")
    response.headers["Content-Security-Policy"] = policy
    return response
