"""The client's generated modules are built from the API document, and both clients send the same requests."""

from __future__ import annotations

import inspect
from typing import Any

import httpx2
import pytest

from millrace.client import AsyncClient, AsyncPager, Client, Pager
from tools import build_files
from tools.openapi.management import DOCUMENT


@pytest.mark.parametrize("name", build_files.CLIENT_MODULES)
def test_modules_are_built_from_the_api_document(name):
    built = (build_files.CLIENT / name).read_bytes()
    assert built == build_files.client_modules(DOCUMENT)[name], "run `make setup`"


def methods(client: Any, prefix: str = "") -> dict[str, Any]:
    found = {}
    for name, resource in vars(client).items():
        if name.startswith("_"):
            continue
        if name == "operator":
            found |= methods(resource, "operator.")
            continue
        for method, function in inspect.getmembers(resource, inspect.ismethod):
            if not method.startswith("_"):
                found[f"{prefix}{name}.{method}"] = function
    return found


def example_arguments(function: Any) -> dict[str, Any]:
    given = {name: 7 for name in inspect.signature(function).parameters}
    return given | {name: "a/b c" for name in ("name", "idempotency_key") if name in given}


async def test_both_clients_send_the_same_requests():
    sent: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        sent.append(request)
        return httpx2.Response(200, json={"results": [], "next": None, "previous": None})

    client = Client("http://host", "sk-x", tenant="acme", transport=httpx2.MockTransport(answer))
    twin = AsyncClient("http://host", "sk-x", tenant="acme", transport=httpx2.MockTransport(answer))
    functions, twins = methods(client), methods(twin)
    assert functions.keys() == twins.keys()
    assert len(functions) > 100
    for name, function in functions.items():
        arguments = example_arguments(function)
        result = function(**arguments)
        if isinstance(result, Pager):
            assert list(result) == []
        pending = twins[name](**arguments)
        if isinstance(pending, AsyncPager):
            assert [row async for row in pending] == []
        else:
            await pending
        first, second = sent[-2:]
        assert (first.method, first.url, first.content) == (second.method, second.url, second.content), name
        if first.method == "POST" and "idempotency_key" not in arguments:  # random: the call changes nothing
            del first.headers["idempotency-key"], second.headers["idempotency-key"]
        assert first.headers == second.headers
        assert ("tenant=acme" in str(first.url)) is not name.startswith("operator."), name
    client.close()
    await twin.close()
