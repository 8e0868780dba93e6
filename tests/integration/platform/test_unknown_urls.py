"""URLs that do not exist outside of the gateway: a page for browsers, an error of the API for its clients."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from millrace.environment.configuration import platform_settings

pytestmark = pytest.mark.django_db
# Of clients with a wrong base URL: without /v1, with another prefix, with a doubled slash.
WRONG = ["/chat/completions", "/messages", "/responses", "/embeddings", "/api-v1/models", "/x//v1/models", "/v1beta/x"]


@pytest.mark.parametrize("path", WRONG)
@pytest.mark.parametrize("method", ["get", "post", "delete", "options"])
def test_a_client_of_the_api_gets_an_error_with_the_base_url(client: Client, path: str, method: str) -> None:
    def call(**headers: str) -> Any:
        return client.generic(method.upper(), path, "{}", content_type="application/json", headers=headers)

    base_url = platform_settings().base_url
    response = call(authorization="Bearer sk-mr-x", accept="application/json")
    assert (response.status_code, response["content-type"]) == (404, "application/json")
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "not_found")
    assert f"{method.upper()} {path}" in error["message"]
    assert f"{base_url}/v1" in error["message"]
    anthropic = call(**{"x-api-key": "sk-mr-x", "anthropic-version": "2023-06-01", "accept": "*/*"}).json()
    assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "not_found_error")


@pytest.mark.parametrize("path", WRONG)
def test_a_browser_gets_a_page(client: Client, path: str) -> None:
    response = client.get(path, headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert response.status_code == 404
    assert response["content-type"].startswith("text/html")


def test_the_management_api_responds_with_problem_details(client: Client) -> None:
    response = client.get("/api/nothing", headers={"accept": "*/*"})
    assert (response.status_code, response["content-type"]) == (404, "application/problem+json")
