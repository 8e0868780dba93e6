"""Upstreams in the operators' console: the form, the test call, and the errors of the last hour."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
import redis
from django.test import Client

from billing.models import CompiledRateCard, DailyCost
from billing.pricing.prices import do_propose_prices, do_publish_prices
from billing.rates.price_book import NewPrice, Proposal, nano_per_million
from billing.rates.pricing import Component, Tier
from frontend.operator.deployments import testing
from inference_worker.contract.upstream_limits import leases_key, limits_key
from millrace.apps.deployments.deployments import do_add_deployment, do_update_deployment
from millrace.apps.deployments.models import Deployment
from millrace.apps.request_log.models import RequestRecord
from millrace.client.testing import TestCallFailed, TestCallResult, send_test_call
from tenants import actions
from tenants.actions.credentials import do_update_credential
from tenants.credentials.encryption import decrypt_secret
from tenants.isolation.scopes import tenant_scope
from tenants.models import UpstreamCredential, User
from tests.support.frontend.console import meter
from tests.support.rows import unscoped
from tests.support.tenants.management_api import reauthenticated
from tests.support.upstreams.fake_gateway import KEY, REQUEST_ID, WAITING_MODEL, fake_gateway

pytestmark = pytest.mark.django_db(transaction=True)

URL = "/operator/deployments/"
HTMX = {"hx-request": "true"}
FIELDS = {
    "name": "remote",
    "engine": "openai",
    "preset": "openai",
    "upstream_model": "gpt-x",
    "secret": "sk-entered-in-the-form",
    "concurrency": "8",
    "pools": "default=1",
    "tools": "on",
    "task": "generate",
}


@pytest.fixture
def operator(broker: redis.Redis) -> Client:
    client = Client()
    client.force_login(User.objects.create_user("op@example.com", is_staff=True))
    return reauthenticated(client)  # type: ignore[arg-type, return-value]


@pytest.fixture
def gateway(settings: Any) -> Iterator[None]:
    with fake_gateway() as url:
        settings.MILLRACE = replace(settings.MILLRACE, public_url=url)
        yield


def test_an_upstream_is_added_and_edited_with_the_form(operator: Client) -> None:
    wrong = operator.post(f"{URL}new/openai", FIELDS | {"base_url": "http://10.0.0.1/v1"})
    assert "Use an https:// URL with a public address" in wrong.content.decode()
    assert "sk-entered-in-the-form" not in wrong.content.decode()
    added = operator.post(f"{URL}new/openai", FIELDS | {"force": "on"})
    assert added.status_code == 303, added.content.decode()
    (row,) = unscoped(Deployment).filter(name="remote")
    assert (row.source, row.concurrency, row.tools, row.images) == ("https://api.openai.com/v1", 8, True, False)
    (credential,) = unscoped(UpstreamCredential).all()
    assert (row.credential_id, decrypt_secret(credential)) == (credential.pk, "sk-entered-in-the-form")
    shown = operator.get(f"{URL}remote/edit").content.decode()
    assert "gpt-x" in shown
    assert "sk-entered" not in shown
    changes = FIELDS | {"credential_id": str(credential.pk), "concurrency": "16", "base_url": row.source}
    assert operator.post(f"{URL}remote/edit", changes).status_code == 303
    (row,) = unscoped(Deployment).filter(name="remote")
    assert (row.concurrency, row.credential_id) == (16, credential.pk)


def test_a_managed_engine_is_added_and_edited_with_the_form(operator: Client) -> None:
    fields = {name: value for name, value in FIELDS.items() if name != "secret"}
    fields |= {"engine": "managed", "preset": "vllm", "command": "vllm serve {model}"}
    refused = operator.post(f"{URL}new/managed", fields)
    assert (refused.status_code, "needs {port}" in refused.content.decode()) == (422, True)
    fields["command"] = "VLLM_API_KEY={api_key} vllm serve {model} --host {host} --port {port}"
    added = operator.post(f"{URL}new/managed", fields)
    assert added.status_code == 303, added.content.decode()
    shown = operator.get(f"{URL}remote/edit").content.decode()
    assert "vllm serve {model} --host {host}" in shown
    assert operator.post(f"{URL}remote/edit", fields | {"upstream_model": "other"}).status_code == 303
    (row,) = unscoped(Deployment).filter(name="remote")
    assert (row.engine, row.source, row.upstream_model, row.command) == ("managed", "other", "other", fields["command"])


@pytest.mark.usefixtures("gateway")
def test_a_test_call_shows_its_answer_speed_usage_and_cost(operator: Client) -> None:
    do_add_deployment("remote", engine="openai", preset="openai", upstream_model="gpt-x")
    price = NewPrice("remote", Tier.STANDARD, Component.OUTPUT, nano_per_million("10"))
    do_publish_prices(do_propose_prices(Proposal((price,))), by=None)
    (card,) = unscoped(CompiledRateCard).filter(model="remote")
    tenant = actions.do_create_tenant("acme", "Acme")
    meter(tenant, request_id=REQUEST_ID, model="remote", output=300_000, price_version=card.pk)
    sent = operator.post(f"{URL}remote/test", {"api_key": KEY, "prompt": "Hi"})
    shown = " ".join(re.sub(r"<[^>]*>", " ", sent.content.decode()).split())
    assert sent.status_code == 200
    assert "Answered Hello!" in shown
    assert re.search(r"TTFT [\d.]+ m?s Tokens/s \d+\.\d Tokens 9 input \( ?4 cached\), 3 output", shown), shown
    assert re.search(r"Cost \$3 ?\.00", shown), shown


@pytest.mark.usefixtures("gateway")
def test_a_rejected_test_call_shows_the_reason(operator: Client) -> None:
    do_add_deployment("remote", engine="openai", preset="openai", upstream_model="gpt-x")
    refused = operator.post(f"{URL}remote/test", {"api_key": "sk-mr-other", "prompt": "Hi"}, headers=HTMX)
    assert refused.status_code == 422
    assert "status 401: Wrong API key." in refused.content.decode()
    assert "sk-mr-other" not in refused.content.decode()
    empty = operator.post(f"{URL}remote/test", {"api_key": "", "prompt": "Hi"}, headers=HTMX)
    assert "API key: This field is required." in empty.content.decode()
    invalid = operator.post(f"{URL}remote/test", {"api_key": "sk-mr-two\nlines", "prompt": "Hi"}, headers=HTMX)
    assert "API key: Enter a valid value." in invalid.content.decode()
    assert "sk-mr-two" not in invalid.content.decode()


@pytest.mark.usefixtures("gateway")
def test_the_cost_of_a_test_call_that_is_not_settled_is_unknown(
    operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(testing, "SETTLE_SECONDS", 0)
    do_add_deployment("remote", engine="openai", preset="openai", upstream_model="gpt-x")
    sent = operator.post(f"{URL}remote/test", {"api_key": KEY, "prompt": "Hi"}, headers=HTMX)
    assert "Not settled yet" in sent.content.decode()


def test_a_test_call_ends_in_time_while_pings_arrive() -> None:
    with fake_gateway() as url, pytest.raises(TestCallFailed, match="not complete after 1 seconds"):
        send_test_call(url, KEY, WAITING_MODEL, "Hi", stream=True, timeout=1)


def test_the_test_page_shows_what_a_deployment_still_needs(operator: Client) -> None:
    do_add_deployment("remote", engine="openai", preset="openai", upstream_model="gpt-x")

    def shown() -> str:
        return operator.get(f"{URL}remote/test").content.decode()

    assert "No worker" in shown()
    assert f"{URL}remote/price" in shown()
    price = NewPrice("remote", Tier.STANDARD, Component.OUTPUT, nano_per_million("10"))
    draft = do_propose_prices(Proposal((price,)))
    assert f"Draft {draft.pk} must be published" in shown()
    do_publish_prices(draft, by=None)
    assert "Published" in shown()
    assert f"{URL}remote/price" not in shown()


def test_the_speed_is_that_after_the_first_token() -> None:
    result = TestCallResult("m", "Hello!", 9, 0, 11, 200, 700, None)
    assert result.tokens_per_second == 20
    assert replace(result, ttft_ms=None).tokens_per_second is None  # not a stream
    assert replace(result, tokens=1).tokens_per_second is None
    assert replace(result, total_ms=200).tokens_per_second is None


def test_errors_and_spend_of_upstreams_are_shown(operator: Client) -> None:
    do_add_deployment("remote", engine="openai", preset="openai", upstream_model="gpt-x", secret="sk-x")
    tenant = actions.do_create_tenant("acme", "Acme")
    common = {"tenant_id": tenant.pk, "project_id": 1, "key_id": 1, "gateway_id": "g", "endpoint": "chat.completions"}
    common |= {"requested_model": "remote", "served_model": "remote", "stream": False, "total_ms": 5}
    codes = ("", "upstream_error", "upstream_error", "server_is_overloaded")
    with tenant_scope(tenant):
        for number, code in enumerate(codes):
            RequestRecord.objects.create(
                **common,
                request_id=f"r{number}",
                status="200" if not code else "502",
                code=code,
                outcome="failed" if code else "completed",
                started_at=datetime.now(UTC),
            )
    (credential,) = unscoped(UpstreamCredential).all()
    do_update_credential(credential, daily_spend_limit_nano=5 * 10**9)
    day = {"day": datetime.now(UTC).date(), "tenant_id": tenant.pk, "model": "remote", "credential_id": credential.pk}
    counts = {"executions": 1, "estimated": 0, "failed_femto": 0, "uncosted_tokens": 0, "unbilled_femto": 0}
    unscoped(DailyCost).create(**day, **counts, cost_femto=2_340_000_000_000_000)
    panel = operator.get(f"{URL}panels/upstreams", headers={"hx-request": "true"}).content.decode()
    cells = dict(re.findall(r'data-label="([^"]*)">(.*?)</td>', panel))
    shown = {name: re.sub(r"<[^>]*>", "", cell) for name, cell in cells.items()}
    assert "api.openai.com" in panel, panel
    assert "share its prompt cache" not in panel  # OpenAI's cache has a key for each tenant
    do_update_deployment("remote", engine="anthropic", preset="anthropic", source="https://api.anthropic.com/v1")
    panel = operator.get(f"{URL}panels/upstreams", headers={"hx-request": "true"}).content.decode()
    assert "Tenants of a credential share its prompt cache" in panel
    assert [shown[name] for name in ("Requests", "Failed", "Rate limited")] == ["4", "2", "1"]
    assert (shown["Most frequent error"], shown["Credential"]) == ("upstream_error", "remote")
    assert shown["Spent today"] == "$2.34credential’s limit $5.00"
    assert shown["Rate limit left"] == "–"


def test_the_limits_that_relays_have_learned_are_shown(operator: Client, broker: redis.Redis) -> None:
    row = do_add_deployment("remote", engine="openai", preset="openai", upstream_model="gpt-x", secret="sk-x")
    credential = row.credential_id
    assert credential is not None
    do_update_credential(unscoped(UpstreamCredential).get(), max_concurrency=4)
    now_ms = broker.time()[0] * 1000  # type: ignore[index]
    fields = {"resumes_at": now_ms + 60_000, "requests_limit": 5000, "requests_left": 1234, "requests_at": now_ms}
    broker.hset(limits_key(row.source, "gpt-x", credential), mapping={**fields, "requests_rate": 0})
    broker.zadd(leases_key(credential), {"running": now_ms + 60_000, "of a killed worker": now_ms - 1})
    panel = operator.get(f"{URL}panels/upstreams", headers={"hx-request": "true"}).content.decode()
    shown = re.sub(r"<[^>]*>", " ", panel)
    assert re.search(r"Paused for (59|60) s", shown), shown
    assert "1,234 / 5,000 requests" in " ".join(shown.split())
    assert "1 / 4 concurrent" in " ".join(shown.split())
