"""The wizard that adds deployments: its steps, its checks of upstreams, and what refused forms show."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from django.test import Client

from billing.models import PriceVersion
from billing.pricing.prices import do_propose_prices, do_publish_prices
from billing.rates.price_book import NewPrice, Proposal, nano_per_million, parse
from billing.rates.pricing import Component, Tier
from frontend.operator.deployments.wizard_forms import SOURCES
from millrace.apps.deployments.deployments import do_add_deployment
from millrace.apps.deployments.models import Deployment
from tenants.actions.credentials import do_create_credential
from tenants.models import UpstreamCredential, User
from tests.support.engine.tiny_qwen3 import write_qwen3
from tests.support.frontend.console import PASSWORD, remembered
from tests.support.rows import unscoped
from tests.support.upstreams.protocol_server import Answer, ProtocolServer

pytestmark = pytest.mark.django_db(transaction=True)
NEW = "/operator/deployments/new"
HTMX = {"hx-request": "true"}
SECRET = "sk-of-the-upstream"
UPSTREAM = {
    "name": "remote", "preset": "", "secret": SECRET, "upstream_model": "org/model", "allow_internal": "on",
    "concurrency": "8", "pools": "default=1", "tools": "on", "task": "generate",
}  # fmt: skip


@pytest.fixture
def operator(broker: redis.Redis) -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser("op@example.com"))
    remembered(client.session)
    return client


@pytest.fixture
def server() -> Iterator[ProtocolServer]:
    server = ProtocolServer()
    server.models, server.secret = ["org/model", "a-model"], SECRET
    yield server
    server.close()


def fields_of(server: ProtocolServer, **changes: str) -> dict[str, str]:
    return UPSTREAM | {"base_url": server.url} | changes


def errors_of(response: Any) -> dict[str, str]:
    """Return the errors below the fields of a form, by the field's name."""
    return dict(re.findall(r'id="id_(\w+)_error">([^<]*)<', response.content.decode()))


def test_each_source_has_a_form_with_few_fields(operator: Client) -> None:
    page = operator.get(NEW).content.decode()
    for slug, source in SOURCES.items():
        assert f'href="{NEW}/{slug}"' in page
        assert 3 <= len(source.shown) <= 5
        form = operator.get(f"{NEW}/{slug}").content.decode()
        shown, folded = form.split('<details class="form-section">')
        for name in source.shown:
            assert f'name="{name}"' in shown
        assert 'name="idle_seconds"' in folded
    assert operator.get(f"{NEW}/unknown").status_code == 404


def test_the_steps_of_a_model_of_the_catalog(operator: Client, tmp_path: Path) -> None:
    """Its source is that of another deployment, whose prices are offered."""
    source = str(write_qwen3(tmp_path / "model"))
    do_add_deployment("first", source)
    prices = tuple(NewPrice("first", Tier.STANDARD, each, nano_per_million("2.5")) for each in Component)
    do_publish_prices(do_propose_prices(Proposal(prices)), by=None)
    page = operator.get(f"{NEW}/catalog").content.decode()
    assert f'<option value="{source}">' in page
    fields = {
        "name": "second", "source": source, "pools": "default=2", "dtype": "auto", "quantization": "none",
        "control_tokens": "template", "tool_parser": "auto", "reasoning_parser": "auto",
    }  # fmt: skip
    added = operator.post(f"{NEW}/catalog", fields)
    assert (added.status_code, added["location"]) == (303, "/operator/deployments/second/price")
    row = unscoped(Deployment).get(name="second")
    assert (row.source, row.pools) == (source, {"default": 2})
    step = operator.get(added["location"]).content.decode()
    assert "Starts with the prices of a deployment of the same model" in step
    assert re.search(r'name="output" value="2\.50"', step)
    typed = "copy_from=first&tier=batch&note=as+typed&model=other"
    copied = operator.get(f"{added['location']}?{typed}", headers=HTMX).content.decode()
    for name, value in (("output", "2.50"), ("note", "as typed"), ("model", "second")):
        assert f'name="{name}" value="{value}"' in copied
    drafted = operator.post(added["location"], {"model": "other", "tier": "standard", "output": "3", "book": "list"})
    assert (drafted.status_code, drafted["location"]) == (303, "/operator/deployments/second/test")
    draft = unscoped(PriceVersion).get(state="draft")
    assert parse(draft.body).prices == (NewPrice("second", Tier.STANDARD, Component.OUTPUT, nano_per_million("3")),)
    assert "Draft" in operator.get(drafted["location"]).content.decode()
    do_publish_prices(draft, by=None)
    own = operator.get(added["location"]).content.decode()
    assert "The deployment has a price" in own
    assert 'name="output" value="3.00"' in own


def test_a_price_form_without_a_price_keeps_what_was_typed(operator: Client) -> None:
    do_add_deployment("remote", engine="openai", preset="openai", upstream_model="gpt-x")
    refused = operator.post(
        "/operator/deployments/remote/price", {"tier": "standard", "output": "a lot", "note": "as typed"}, headers=HTMX
    )
    assert refused.status_code == 422
    assert set(errors_of(refused)) == {"output"}
    text = refused.content.decode()
    assert 'value="a lot"' in text
    assert 'value="as typed"' in text
    assert '<details class="form-section" open>' in text  # a folded field was changed


def test_the_models_of_an_upstream_fill_a_picker(operator: Client, server: ProtocolServer) -> None:
    found = operator.post(f"{NEW}/openai/models", fields_of(server, name="", upstream_model=""))
    assert found.status_code == 200
    assert re.findall(r"<option>([^<]*)</option>", found.content.decode()) == ["a-model", "org/model"]
    chosen = operator.post(f"{NEW}/openai/models", fields_of(server)).content.decode()
    assert "<option selected>org/model</option>" in chosen
    assert server.received[0].path == "/v1/models"
    assert server.received[0].headers["authorization"] == f"Bearer {SECRET}"
    server.models = []
    assert "lists no models" in operator.post(f"{NEW}/openai/models", fields_of(server)).content.decode()
    server.default = Answer(status=404)
    assert "lists no models" in operator.post(f"{NEW}/openai/models", fields_of(server)).content.decode()
    assert operator.post(f"{NEW}/path/models", fields_of(server)).status_code == 404


def test_the_models_of_anthropic_are_listed_with_its_headers(operator: Client, server: ProtocolServer) -> None:
    found = operator.post(f"{NEW}/anthropic/models", fields_of(server, preset="anthropic"))
    assert "<option selected>org/model</option>" in found.content.decode()
    (received,) = server.received
    assert received.path == "/v1/models?limit=1000"
    assert (received.headers["x-api-key"], "anthropic-version" in received.headers) == (SECRET, True)


def test_a_stored_credential_lists_the_models(operator: Client, server: ProtocolServer) -> None:
    credential = do_create_credential(None, "stored", SECRET)
    fields = fields_of(server, secret="", credential_id=str(credential.pk))
    assert "2 models" in operator.post(f"{NEW}/openai/models", fields).content.decode()
    assert operator.post(f"{NEW}/openai", fields).status_code == 303
    assert unscoped(Deployment).get(name="remote").credential_id == credential.pk


@pytest.mark.parametrize(
    ("changes", "field", "reason"),
    [
        ({"base_url": "http://127.0.0.1:1/v1"}, "base_url", "The upstream cannot be reached. The connection failed"),
        ({"base_url": "http://127.0.0.1:1/v1", "allow_internal": ""}, "base_url", "The URL must begin with https://."),
        ({"base_url": "https://127.0.0.1/v1", "allow_internal": ""}, "base_url", "The address 127.0.0.1 is internal."),
        ({"base_url": ""}, "base_url", "Enter the base URL of the upstream"),
        ({"base_url": "https://[::1/v1"}, "base_url", "Enter an http:// or https:// URL without a query."),
        ({"secret": "sk-wrong"}, "secret", "The upstream rejects the API key (status 401)"),
        ({"secret": ""}, "secret", "The upstream needs an API key (status 401)."),
        ({"secret": "two words"}, "secret", "printable ASCII characters without spaces"),
    ],
)  # fmt: skip
def test_an_upstream_whose_check_fails_is_refused_with_the_reason(
    operator: Client, server: ProtocolServer, changes: dict[str, str], field: str, reason: str
) -> None:
    fields = fields_of(server, **changes)
    listed = operator.post(f"{NEW}/openai/models", fields, headers=HTMX)
    assert listed.status_code == 422
    assert reason in listed.content.decode()
    refused = operator.post(f"{NEW}/openai", fields, headers=HTMX)
    assert refused.status_code == 422
    assert reason in errors_of(refused)[field]
    text = refused.content.decode()
    assert 'value="org/model"' in text
    assert "sk-wrong" not in text
    assert '<details class="form-section" open>' in text  # which has what can solve it
    assert not unscoped(Deployment).filter(name="remote")
    assert not unscoped(UpstreamCredential).all()


def test_an_upstream_whose_check_fails_is_added_if_forced(operator: Client, server: ProtocolServer) -> None:
    fields = fields_of(server, secret="sk-wrong")
    assert "Tick “Force” to add it anyway." in operator.post(f"{NEW}/openai", fields).content.decode()
    assert operator.post(f"{NEW}/openai", fields | {"force": "on"}).status_code == 303
    assert unscoped(Deployment).get(name="remote").source == server.url


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(status=500), "The upstream responded with the status 500."),
        (Answer(status=302), "The upstream responded with the status 302."),
    ],
)
def test_an_unexpected_response_is_no_list(
    operator: Client, server: ProtocolServer, answer: Answer, reason: str
) -> None:
    server.default = answer
    assert reason in operator.post(f"{NEW}/openai/models", fields_of(server)).content.decode()


def test_a_page_that_is_no_api_is_no_list(operator: Client, server: ProtocolServer) -> None:
    fields = fields_of(server, base_url=f"{server.url}/embeddings/models")
    server.models = json.loads("[1]")
    assert "The response is no list of models." in operator.post(f"{NEW}/openai/models", fields).content.decode()


def test_an_unreadable_source_is_refused_with_the_reason(operator: Client, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"no GGUF")
    fields = {
        "name": "own", "source": str(file), "quantization": "none", "max_model_len": "64", "pools": "default=3",
        "dtype": "auto", "control_tokens": "template", "tool_parser": "auto", "reasoning_parser": "auto",
        "revision": "v7",
    }  # fmt: skip
    refused = operator.post(f"{NEW}/path", fields, headers=HTMX)
    assert refused.status_code == 422
    assert "Set force to use it anyway" in errors_of(refused)["source"]
    for value in (str(file), "64", "default=3", "v7"):
        assert f'value="{value}"' in refused.content.decode()


def test_a_credential_is_sent_only_after_a_recent_sign_in(broker: redis.Redis, server: ProtocolServer) -> None:
    client = Client()
    client.force_login(User.objects.create_superuser("op@example.com"))
    credential = do_create_credential(None, "stored", SECRET)
    fields = fields_of(server, secret="", credential_id=str(credential.pk))
    for path in (f"{NEW}/openai/models", f"{NEW}/openai"):
        assert client.post(path, fields, headers=HTMX).status_code == 401
    assert not server.received


def test_an_api_key_is_not_stored_in_the_session(broker: redis.Redis, server: ProtocolServer) -> None:
    """Without scripts, the form is entered again after the re-authentication."""
    client = Client()
    client.force_login(User.objects.create_superuser("op@example.com", PASSWORD))
    asked = client.post(f"{NEW}/openai", fields_of(server))
    assert asked.status_code == 302
    assert SECRET not in str(dict(client.session.items()))
    confirmed = client.post(asked["location"], {"password": PASSWORD, "next": f"{NEW}/openai"})
    assert confirmed["location"] == f"{NEW}/openai"
    assert client.get(confirmed["location"]).status_code == 200
    assert not server.received


@pytest.mark.parametrize("check_id", ["²", "../x", "none"])
def test_an_unknown_fit_check_is_ignored(operator: Client, check_id: str) -> None:
    refused = operator.post(f"{NEW}/path", {"fit_check": check_id})
    assert refused.status_code == 422
    assert "fit_check" not in refused.content.decode()


def test_other_users_add_nothing(client: Client, server: ProtocolServer) -> None:
    client.force_login(User.objects.create_user("owner@example.com"))
    for path in (NEW, f"{NEW}/openai", f"{NEW}/openai/models"):
        assert client.post(path, fields_of(server)).status_code == 404
    assert not server.received
