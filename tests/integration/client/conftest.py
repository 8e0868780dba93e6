"""A tenant, and clients of the management API in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import httpx2
import pytest

if TYPE_CHECKING:
    from millrace.cli.profiles import Connection
    from millrace.client import Client
    from tests.support.tenants.management_api import Row

URL = "http://testserver"


@pytest.fixture
def connect(one_connection: None) -> Callable[[Connection], Client]:
    """Return a function that makes a client whose requests Django answers in this thread."""
    from django.core.wsgi import get_wsgi_application

    from millrace.client import Client

    def connect(connection: Connection, tenant: str | None = None) -> Client:
        transport = httpx2.WSGITransport(app=get_wsgi_application())
        return Client(
            connection.url, connection.api_key, cookies=connection.cookies, tenant=tenant, transport=transport
        )

    return connect


@pytest.fixture
def key_connection(furnished_acme: Row) -> Connection:
    """The credentials of a key with the scope `manage`."""
    from millrace.cli.profiles import Connection
    from tenants import actions
    from tests.support.tenants.management_api import only_default

    return Connection(
        URL, actions.do_create_api_key(only_default(furnished_acme.tenant), "manage", scopes=["manage"])[1]
    )


@pytest.fixture
def operator_connection(furnished_acme: Row) -> Connection:
    """The credentials of an operator who has just signed in."""
    from django.middleware.csrf import get_token
    from django.test import RequestFactory

    from millrace.cli.profiles import Connection
    from tenants.models import User
    from tests.support.tenants.management_api import by_person

    session = by_person(User.objects.create_superuser("op@example.com"))
    request = RequestFactory().get("/")
    get_token(request)
    cookies = {"sessionid": session.cookies["sessionid"].value, "csrftoken": request.META["CSRF_COOKIE"]}
    return Connection(URL, cookies=cookies)
