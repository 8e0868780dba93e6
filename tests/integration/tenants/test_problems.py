"""Responses of the management API to unknown paths."""

from __future__ import annotations

import pytest
from django.test import Client


@pytest.mark.django_db
@pytest.mark.parametrize("path", ["/api/nothing", "/api/keys/one/two/three", "/api/operator/nothing?x=1"])
def test_an_unknown_path_of_the_api_is_a_problem(path: str) -> None:
    for method in ("get", "post"):
        answer = getattr(Client(), method)(path)
        assert (answer.status_code, answer["content-type"]) == (404, "application/problem+json")
        assert answer.json()["code"] == "not_found"
        assert {"type", "title", "status", "detail"} <= answer.json().keys()


@pytest.mark.django_db
def test_other_unknown_paths_return_a_page_and_a_missing_slash_redirects() -> None:
    page = Client().get("/nothing", headers={"accept": "text/html"})
    assert (page.status_code, page["content-type"].partition(";")[0]) == (404, "text/html")
    assert Client().get("/api/docs").headers["location"] == "/api/docs/"
