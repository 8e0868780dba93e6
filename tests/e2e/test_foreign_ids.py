"""Objects of another project and of another tenant: every route with an ID answers as for an ID that never existed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import pytest

from millrace.gateway.routes import documented_consumers
from tests.support.e2e.batches import entry, finished, line, upload
from tests.support.e2e.keys import make_key
from tests.support.stack import MODEL, Stack, eventually

_PARAMETER = re.compile(r"<\w+:(\w+)>")
NOT_OWNED = {"/v1/models/<path:name>"}  # models are shared
BODIES: dict[str, Any] = {"/v1/requests/<str:request_id>/feedback": {"success": True}}
QUERIES = {"/v1/responses/<str:response_id>": "?stream=true"}
# Routes without an ID in the path that take one elsewhere: method, path, body.
REFERENCES: dict[str, tuple[str, str, Any]] = {
    "files?after": ("GET", "/v1/files?after={file}", None),
    "batches?after": ("GET", "/v1/batches?after={batch}", None),
    "message batches?after_id": ("GET", "/v1/messages/batches?after_id={message_batch}", None),
    "message batches?before_id": ("GET", "/v1/messages/batches?before_id={message_batch}", None),
    "file of a batch": (
        "POST",
        "/v1/batches",
        {"input_file_id": "{file}", "endpoint": "/v1/completions", "completion_window": "24h"},
    ),
}


def routes() -> Iterator[tuple[str, str]]:
    """Yield the method and the path of each route with an ID."""
    for path, consumer in documented_consumers():
        if "<" in path and path not in NOT_OWNED:
            yield consumer.method, path


ROUTES = sorted(set(routes()))


def kind_of(path: str) -> str:
    """Return the kind of object that a route's ID names."""
    if path.startswith("/v1/messages/batches/"):
        return "message_batch"
    (parameter,) = _PARAMETER.findall(path)
    return str(parameter).removesuffix("_id")


@pytest.fixture(scope="module")
def ids(stack: Stack) -> dict[str, str]:
    """Return an ID of each kind of object of the demo tenant's default project."""
    client = stack.client()
    file = upload(client, [line("a")])
    batch = client.batches.create(input_file_id=file, endpoint="/v1/chat/completions", completion_window="24h").id
    with anthropic.Anthropic(base_url=stack.url, api_key=stack.key, max_retries=0) as messages:
        message_batch = messages.messages.batches.create(requests=[entry("a")]).id
        eventually(lambda: messages.messages.batches.retrieve(message_batch).processing_status == "ended", 240)
    finished(client, batch, 240)
    body = {"model": MODEL, "input": "Hello", "max_output_tokens": 4, "stream": True}
    response = httpx2.post(f"{stack.url}/v1/responses", json=body, headers=stack.headers, timeout=120)
    request = response.headers["x-request-id"]
    found = {"file": file, "batch": batch, "message_batch": message_batch, "request": request}
    return found | {"response": "resp_" + request.removeprefix("req_")}


@pytest.fixture(scope="module")
def strangers(stack: Stack, neighbor: str) -> dict[str, str]:
    """Return the secrets of keys of another project and of another tenant."""
    made = httpx2.post(f"{stack.url}/api/projects", json={"name": "Other"}, headers=stack.headers, timeout=60)
    assert made.status_code == 201, made.text
    return {"project": make_key(stack, "stranger", project_id=made.json()["id"]), "tenant": neighbor}


def never(name: str) -> str:
    """Return an ID of the same form that never existed."""
    return name[:-8] + "0" * 8


def send(stack: Stack, secret: str, method: str, path: str, body: Any = None) -> httpx2.Response:
    headers = {"authorization": f"Bearer {secret}"}
    return httpx2.request(method, f"{stack.url}{path}", json=body, headers=headers, timeout=60)


def answer_of(response: httpx2.Response, name: str) -> Any:
    """Return the status and the body without the ID and the request's own ID."""
    body = response.json()
    body.pop("request_id", None)
    return response.status_code, str(body).replace(name.removeprefix("resp_"), "ID")  # a response has its request's ID


@pytest.mark.parametrize(("method", "path"), ROUTES, ids=[f"{method} {path}" for method, path in ROUTES])
@pytest.mark.parametrize("who", ["project", "tenant"])
def test_a_route_with_an_id(
    stack: Stack, ids: dict[str, str], strangers: dict[str, str], who: str, method: str, path: str
) -> None:
    name = ids[kind_of(path)]
    query, body = QUERIES.get(path, ""), BODIES.get(path)
    if method == "GET":
        own = send(stack, stack.key, method, _PARAMETER.sub(name, path) + query)
        assert own.status_code == 200, own.text
    answers = []
    for each in (name, never(name)):
        response = send(stack, strangers[who], method, _PARAMETER.sub(each, path) + query, body)
        answers.append(answer_of(response, each))
    assert answers[0] == answers[1]
    assert answers[0][0] == 404
    if method == "DELETE":  # it is still there
        assert send(stack, stack.key, "GET", _PARAMETER.sub(name, path)).status_code == 200


@pytest.mark.parametrize("reference", REFERENCES.values(), ids=REFERENCES)
@pytest.mark.parametrize("who", ["project", "tenant"])
def test_an_id_elsewhere(
    stack: Stack, ids: dict[str, str], strangers: dict[str, str], who: str, reference: tuple[str, str, Any]
) -> None:
    method, path, body = reference
    answers = []
    for change in (str, never):
        names = {kind: change(name) for kind, name in ids.items()}
        filled = body and {field: value.format(**names) for field, value in body.items()}
        response = send(stack, strangers[who], method, path.format(**names), filled)
        body_text = str({**response.json(), "request_id": None})
        answers.append((response.status_code, re.sub("|".join(names.values()), "ID", body_text)))
        if method == "GET" and change is str:
            assert send(stack, stack.key, method, path.format(**names)).status_code == 200
    assert answers[0] == answers[1]
    assert answers[0][0] == 404


def test_lists_have_no_objects_of_other_projects(stack: Stack, ids: dict[str, str], strangers: dict[str, str]) -> None:
    for secret in strangers.values():
        for path in ("files", "batches", "messages/batches"):
            assert send(stack, secret, "GET", f"/v1/{path}").json()["data"] == []
