"""Sessions of test clients and browsers."""

from __future__ import annotations

import time

from django.contrib.sessions.models import Session
from django.test import Client


def make_old(client: Client) -> None:
    """Change the session so that its last authentication was an hour ago."""
    session = client.session
    records = session["account_authentication_methods"]
    session["account_authentication_methods"] = [record | {"at": time.time() - 3600} for record in records]
    session.save()


def forget_authentication() -> None:
    """Remove the recent authentication from all sessions, which stay signed in."""
    for row in Session.objects.all():
        data = row.get_decoded()
        data.pop("account_authentication_methods", None)
        row.session_data = Session.objects.encode(data)
        row.save()
