"""Conformance of the management API to its schema: any request gets a documented response and never a 500."""

from __future__ import annotations

import os
from typing import Any

import pytest
import schemathesis
from django.core.wsgi import get_wsgi_application
from django.middleware.csrf import get_token
from django.test import Client, RequestFactory
from drf_spectacular.generators import SchemaGenerator
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance

from tenants import actions
from tenants.models import User
from tests.support.tenants.management_api import by_person, only_default

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("one_connection")]
SCHEMA = schemathesis.openapi.from_dict(SchemaGenerator().get_schema(public=True))
SCHEMA.app = get_wsgi_application()
OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations()]
EXAMPLES = int(os.environ.get("SCHEMA_EXAMPLES", "4"))
ONCE = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def key(furnished_acme) -> str:
    return actions.do_create_api_key(only_default(furnished_acme.tenant), "manage", scopes=["manage"])[1]


@pytest.fixture
def operator(furnished_acme) -> dict[str, str]:
    """Return a signed-in operator's headers, with the CSRF token."""
    client: Client = by_person(User.objects.create_superuser("op@example.com"))
    request = RequestFactory().get("/")
    token = get_token(request)
    cookies = f"sessionid={client.cookies['sessionid'].value}; csrftoken={request.META['CSRF_COOKIE']}"
    return {"Cookie": cookies, "X-CSRFToken": token}


def try_out(operation: Any, headers: dict[str, str], checks: list[Any]) -> None:
    @ONCE
    @given(operation.as_strategy())
    def send(case: Any) -> None:
        response = case.call(headers={"Accept-Encoding": "identity", **headers})  # it would not decompress the response
        case.validate_response(response, checks=checks if response.status_code < 300 else [not_a_server_error])

    send()


@pytest.mark.parametrize("operation", OPERATIONS, ids=[operation.label for operation in OPERATIONS])
def test_requests_with_a_key(operation, key):
    try_out(operation, {"Authorization": f"Bearer {key}"}, [not_a_server_error, response_schema_conformance])


@pytest.mark.parametrize("operation", OPERATIONS, ids=[operation.label for operation in OPERATIONS])
def test_requests_of_an_operator(operation, operator):
    try_out(operation, operator, [not_a_server_error, response_schema_conformance])
