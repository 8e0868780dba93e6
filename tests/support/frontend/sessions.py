"""Sessions of test clients."""

from __future__ import annotations

import time

from django.test import Client


def make_old(client: Client) -> None:
    """Change the session so that its last authentication was an hour ago."""
    session = client.session
    records = session["account_authentication_methods"]
    session["account_authentication_methods"] = [record | {"at": time.time() - 3600} for record in records]
    session.save()
