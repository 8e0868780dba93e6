"""Models that cannot serve a tenant's requests: each place that names a model refuses or names them.

The obstacles are those of a gateway: no deployment, an unloaded or drained one, no price, or no ready replica.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test import Client
from rest_framework.test import APIClient

from billing.models import CompiledRateCard
from billing.rates.pricing import Component, Rate, encode_rates
from inference_worker.contract.deployments import WantedState
from inference_worker.contract.messages import Heartbeat, ReplicaPhase
from millrace.apps.deployments import model_obstacles, served_deployments
from millrace.apps.deployments.deployments import do_add_deployment
from millrace.apps.deployments.fleet_status import FleetStatus, ReplicaState, ReplicaStatus
from millrace.apps.deployments.model_obstacles import example_model, read_obstacles
from millrace.apps.policy_results.policy_dry_runs import dry_run
from millrace.apps.request_log.models import RequestRecord
from tenants import actions
from tenants.actions.common import FieldRefused
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import Experiment, RoutingPolicy, RoutingPolicyDraft, Tenant, User
from tenants.routing_policies.policy import parse
from tenants.routing_policies.target_checks import ModelObstacle, TargetChecks, find_obstacles
from tests.support.billing.books import dollars, rate_card
from tests.support.rows import of, only_project
from tests.support.tenants.management_api import by_key, by_role

pytestmark = pytest.mark.django_db
EXPECTED = {
    "fine": None,
    "own-price": None,
    "sleeping": None,
    "unknown": ModelObstacle.UNKNOWN,
    "no-price": ModelObstacle.UNPRICED,
    "no-output-price": ModelObstacle.UNPRICED,
    "later-price": ModelObstacle.UNPRICED,
    "others-price": ModelObstacle.UNPRICED,
    "batch-price": ModelObstacle.UNPRICED,
    "ended-price": ModelObstacle.UNPRICED,
    "unloaded": ModelObstacle.UNLOADED,
    "drained": ModelObstacle.DRAINED,
    "silent": ModelObstacle.NOT_READY,
}
BLOCKED = [name for name, obstacle in EXPECTED.items() if obstacle is not None and not obstacle.is_temporary]
FINE = {"model": "fine"}
# Each place of a policy that names a model: its path and the body with a model there.
PLACES: dict[str, Callable[[str], dict[str, Any]]] = {
    "$.models[0]": lambda model: {"models": [model]},
    "$.models[1]": lambda model: {"models": ["fine", model]},
    "$.rules[0].targets[0].model": lambda model: {"rules": [{"targets": [{"model": model}]}]},
    "$.rules[0].targets[1].model": lambda model: {"rules": [{"targets": [FINE, {"model": model, "weight": 0}]}]},
    "$.rules[1].targets[1].model": lambda model: {
        "rules": [
            {"when": {"tools": True}, "targets": [FINE]},
            {"targets": [FINE, {"model": model}], "escalate": {"on": ["empty"]}},
        ]
    },
    "$.summarizer": lambda model: {
        "rules": [{"targets": [FINE]}], "context_overflow": "summarize", "summarizer": model,
    },
    "$.shadow.model": lambda model: {"rules": [{"targets": [FINE]}], "shadow": {"model": model, "percent": 5}},
}  # fmt: skip
NAMES = list(PLACES)


@pytest.fixture
def acme(acme: Tenant, monkeypatch: pytest.MonkeyPatch) -> Tenant:
    """The tenant on a platform with a deployment for each row of EXPECTED."""
    other = actions.do_create_tenant("other", "Other")
    states = {"unloaded": WantedState.UNLOADED, "drained": WantedState.DRAINED}
    for name in ("fine", *(name for name in EXPECTED if name not in ("fine", "unknown"))):
        idle = {"idle_seconds": 60} if name == "sleeping" else {}
        do_add_deployment(name, "/models/own", state=states.get(name, WantedState.LOADED), **idle)
    for name in ("fine", "sleeping", "unloaded", "drained", "silent", "unknown"):
        rate_card(name)
    rate_card("own-price", tenant_id=acme.pk)
    rate_card("others-price", tenant_id=other.pk)
    rate_card("no-output-price", uncached="1", cache_read="1")
    rate_card("batch-price", tier="batch")
    rate_card("ended-price")
    _later_rate_card("later-price", datetime.now(UTC) + timedelta(hours=1), uncached="1", cache_read="1", output="1")
    _later_rate_card("ended-price", datetime.now(UTC) - timedelta(hours=1))
    ready = set(EXPECTED) - {"silent", "sleeping", "unknown"}
    monkeypatch.setattr(FleetStatus, "count_ready", lambda self, model: int(model in ready))
    monkeypatch.setattr(model_obstacles, "read_fleet_status", lambda: FleetStatus((), (), None, None))
    return acme


def _later_rate_card(model: str, effective_from: datetime, **usd: str) -> None:
    """Add a rate card that starts at another time. Without prices, it ends the earlier ones."""
    rates = [Rate(1, Component(component), dollars(amount)) for component, amount in usd.items()]
    with all_tenants_scope(BypassReason.COMMAND):
        CompiledRateCard.objects.create(
            model=model, tier="standard", effective_from=effective_from, rates=encode_rates(tuple(rates))
        )


def problem(model: str) -> tuple[str, bool] | None:
    obstacle = EXPECTED[model]
    return None if obstacle is None else (obstacle.value, not obstacle.is_temporary)


def console(tenant: Tenant) -> Client:
    user = User.objects.create_user("owner@example.com")
    actions.do_add_member(tenant, user, "owner")
    client = Client()
    client.force_login(user)
    return client


@pytest.mark.parametrize(("load_ms", "is_obstacle"), [(5000, False), (0, True)])
def test_a_model_that_is_loaded_on_demand_has_no_obstacle(
    acme: Tenant, monkeypatch: pytest.MonkeyPatch, load_ms: int, is_obstacle: bool
) -> None:
    beat = Heartbeat(1, "silent", False, False, 0, 0, 0, 0, 0, phase=ReplicaPhase.LOADING, load_ms=load_ms)
    replica = ReplicaStatus("w-0.1", ReplicaState.STARTING, beat, 100)
    monkeypatch.setattr(model_obstacles, "read_fleet_status", lambda: FleetStatus((replica,), (), None, None))
    assert ("silent" in read_obstacles(acme.pk, ["silent"], with_replicas=True)) == is_obstacle


def test_the_obstacles_are_those_of_a_gateway(acme: Tenant) -> None:
    found = read_obstacles(acme.pk, list(EXPECTED), with_replicas=True)
    assert {name: found.get(name) for name in EXPECTED} == EXPECTED
    without_replicas = find_obstacles(acme.pk, list(EXPECTED))
    assert "silent" not in without_replicas
    assert {**without_replicas, "silent": ModelObstacle.NOT_READY} == found


@pytest.mark.parametrize("place", NAMES)
def test_a_place_of_a_policy(acme: Tenant, place: str) -> None:
    client = by_key(acme)
    for model in EXPECTED:
        check_place(client, acme, place, model)


def check_place(client: APIClient, acme: Tenant, place: str, model: str) -> None:
    """Assert that a policy with the model at a place can be published exactly if the model has no blocking obstacle."""
    body, wanted, name = PLACES[place](model), problem(model), f"policy-{model}"
    if model == "fine" and place == "$.models[1]":
        body = {"models": ["own-price", "fine"]}
    elif model == "fine" and place.endswith("targets[1].model"):
        body = json.loads(json.dumps(body).replace('{"model": "fine"}', '{"model": "own-price"}', 1))
        for rule in body["rules"]:
            rule["targets"] = rule["targets"][:1]
            rule.pop("escalate", None)
    validated = client.post("/api/policies/validate", {"body": body}, format="json").json()
    draft = client.post("/api/policy-drafts", {"name": name, "body": body}, format="json").json()
    published = client.post("/api/policies", {"name": name, "body": body}, format="json")
    from_draft = client.post(f"/api/policy-drafts/{draft['id']}/publish")
    found = [(each["place"], each["model"], each["code"], each["is_blocking"]) for each in validated["problems"]]
    assert found == ([] if wanted is None else [(place, model, *wanted)])
    if wanted is not None and wanted[1]:
        assert (validated["valid"], published.status_code, from_draft.status_code) == (False, 400, 400), model
        assert published.json()["code"] == from_draft.json()["code"] == wanted[0]
        (text,) = published.json()["errors"]["body"]
        assert validated["error"] == text
        assert text.startswith(place) and repr(model) in text
        assert [policy for policy in of(RoutingPolicy, acme) if policy.name == name] == []
        assert [each["place"] for each in draft["problems"]] == [place]
    else:
        assert (validated["valid"], published.status_code) == (True, 201), model


@pytest.mark.parametrize("model", BLOCKED)
def test_a_version_is_not_published_again(acme: Tenant, model: str) -> None:
    old = actions.do_publish_policy(acme, "mine", {"models": [model]}, check_targets=False)
    with pytest.raises(FieldRefused) as refused:
        actions.do_revert_policy(old)
    assert (refused.value.field, refused.value.code) == ("body", problem(model)[0])
    (listed,) = by_key(acme).get("/api/policies?active=true").json()["results"]  # remains, and is named
    assert [each["model"] for each in listed["problems"]] == [model]
    shown = console(acme).get(f"/t/acme/routing/{old.pk}").content.decode()
    assert model in shown and "banner bad" in shown


def test_an_arm_of_an_experiment(acme: Tenant) -> None:
    client, member = by_key(acme), console(acme)
    for model in EXPECTED:
        check_arm(client, member, acme, model)


def check_arm(client: APIClient, member: Client, acme: Tenant, model: str) -> None:
    """Assert that an experiment with the model as an arm starts exactly if the model has no blocking obstacle."""
    arms = [{"name": "a", "share": 50}, {"name": "b", "share": 50, "model": model}]
    wanted, name = problem(model), f"arm-{model}"
    made = client.post("/api/experiments", {"name": name, "model": name, "arms": arms}, format="json")
    assert made.status_code == 201, made.json()
    blocks = wanted is not None and wanted[1]
    assert [each["place"] for each in made.json()["problems"]] == (
        ["$.arms[1].model"] if wanted is not None and model != "silent" else []
    )
    started = client.post(f"/api/experiments/{made.json()['id']}/start")
    assert started.status_code == (400 if blocks else 200), started.json()
    if wanted is not None and blocks:
        assert started.json()["code"] == wanted[0]
        assert "$.arms[1].model" in started.json()["errors"]["arms"][0]
        (row,) = (row for row in of(Experiment, acme) if row.name == name)
        assert row.state == Experiment.State.DRAFT
        page = member.get(f"/t/acme/experiments/{row.pk}").content.decode()
        assert "banner bad" in page


@pytest.mark.parametrize(
    ("model", "code"), [("unknown", "model_not_found"), ("no-price", "model_not_priced"), ("fine", "")]
)
def test_a_dry_run_counts_rejected_requests(acme: Tenant, model: str, code: str) -> None:
    with tenant_scope(acme):
        for number in range(3):
            RequestRecord.objects.create(
                tenant_id=acme.pk, request_id=f"req_{number}", started_at=datetime.now(UTC), project_id=1, key_id=1,
                gateway_id="g", endpoint="chat.completions", stream=False, requested_model="mine", status="200",
                served_model="fine", code="", outcome="completed", total_ms=9, prompt_tokens=9, route={"facts": {}},
            )  # fmt: skip
        run = dry_run(acme.pk, parse({"models": [model]}), "mine")
        after_unknown = dry_run(acme.pk, parse({"models": ["unknown", "fine"]}), "mine")
    assert dict(run.rejected) == ({(model, code): 3} if code else {})
    assert not after_unknown.rejected  # gateways skip it
    assert after_unknown.shares == [("fine", 3, 3)]
    answer = by_key(acme).post("/api/policies/dry-run", {"name": "mine", "body": {"models": [model]}}, format="json")
    assert answer.json()["rejected"] == ([{"model": model, "code": code, "requests": 3}] if code else [])


def test_the_editor_of_the_console(acme: Tenant) -> None:
    client = console(acme)
    for model in EXPECTED:
        check_editor(client, acme, model)


def check_editor(client: Client, acme: Tenant, model: str) -> None:
    """Assert that the editor publishes a policy with the model exactly if the model has no blocking obstacle."""
    wanted, name = problem(model), f"policy-{model}"
    body = json.dumps({"rules": [{"targets": [{"model": model}]}]})
    shown = client.post("/t/acme/routing/check", {"name": name, "body": body}).content.decode()
    blocks = wanted is not None and wanted[1]
    assert ("Cannot be published" in shown) == blocks, model
    assert ("banner bad" in shown, "banner warn" in shown) == (blocks, wanted is not None and not blocks), model
    response = client.post("/t/acme/routing/edit", {"name": name, "body": body, "publish": "1"})
    assert response.status_code == (422 if blocks else 303)
    if not blocks:
        return
    assert [policy for policy in of(RoutingPolicy, acme) if policy.name == name] == []
    saved = client.post("/t/acme/routing/edit", {"name": name, "body": body, "draft": "1"})
    assert [draft.name for draft in of(RoutingPolicyDraft, acme)].count(name) == 1
    assert "banner bad" in client.get(saved.headers["Location"]).content.decode()


@pytest.mark.parametrize("first", [*BLOCKED, "drained"])
def test_proposals_and_defaults_are_models_that_serve(
    acme: Tenant, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = model_obstacles.served_states

    def first_of_all() -> Any:
        return sorted(states(), key=lambda served: (served.spec.name != first, served.spec.name != "fine"))

    for module in (served_deployments, model_obstacles):
        monkeypatch.setattr(module, "served_states", first_of_all)
    assert example_model(acme.pk) == "fine"
    client = console(acme)
    assert '"model": "fine"' in client.get("/t/acme/routing/edit").content.decode().replace("&quot;", '"')
    actions.do_create_api_key(only_project(acme), "live")
    actions.do_publish_policy(acme, "alias", {"models": [first]}, check_targets=False)
    page = client.get("/t/acme/playground/").content.decode()
    assert 'value="fine" checked' in page
    assert page.count(" checked>") == 1
    asked = client.get(f"/t/acme/playground/?model={first},alias").content.decode()
    assert f'value="{first}" checked' not in asked
    if first in BLOCKED:
        assert 'value="alias" checked' not in asked


def test_problems_of_many_rows_are_read_once(acme: Tenant, django_assert_max_num_queries: Any) -> None:
    for number in range(20):
        actions.do_publish_policy(acme, f"alias-{number}", {"models": ["no-price"]}, check_targets=False)
    client = by_key(acme)
    with django_assert_max_num_queries(30):
        listed = client.get("/api/policies").json()["results"]
    assert [each["problems"][0]["code"] for each in listed] == ["model_not_priced"] * 20
    shown = by_role(acme, "owner").get("/t/acme/routing/panels/names").content.decode()
    assert shown.count("Target problem") == 20


def test_the_semantic_cache_only_warns(acme: Tenant, monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    monkeypatch.setattr(type(settings.MILLRACE), "semantic_cache_model", "no-price", raising=False)
    body = {"rules": [{"targets": [FINE]}], "semantic_cache": True}
    with tenant_scope(acme):
        (found,) = TargetChecks(acme.pk).of_policy(body)
    assert (found.place, found.is_blocking) == ("$.semantic_cache", False)
    assert actions.do_publish_policy(acme, "mine", body).active
