"""The steps that `millrace up` runs at every start: the first one creates objects, later ones restore nothing."""

from __future__ import annotations

import io
import json
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from django.apps import apps
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.test import Client

from billing.models import PriceBook
from billing.pricing.prices import do_assign_book, do_propose_prices, do_publish_prices
from billing.rates.price_book import NewPrice, Proposal
from billing.rates.pricing import Component, Tier
from inference_worker.contract.deployments import WANTED_KEY, WantedState, decode_wanted
from millrace.apps.deployments.catalog_copy import copy_deployments
from millrace.apps.deployments.deployments import (
    do_add_deployment,
    do_import_settings,
    do_remove_deployment,
    do_set_deployment_state,
    do_update_deployment,
)
from millrace.apps.deployments.models import Deployment
from millrace.apps.deployments.served_deployments import served_specs
from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import ApiKey, AuditEntry, Membership, Project, Tenant, User
from tests.support.rows import of, unscoped

pytestmark = pytest.mark.django_db
MODEL = "smollm2-135m"


def manage(*words: str) -> str:
    out = io.StringIO()
    call_command(*words, stdout=out)
    return out.getvalue()


def start() -> dict[str, str]:
    """Run the steps of a start that change the database. Return the accounts that `bootstrap` prints."""
    (line,) = manage("bootstrap").splitlines()
    manage("import_models")
    manage("price_book", "backfill")
    return dict(json.loads(line))


@pytest.fixture
def credentials() -> Path:
    """Return the path of the file with the first logins, which does not exist yet."""
    path = Path(os.environ["MILLRACE_DATA_DIR"], "credentials.json")
    path.unlink(missing_ok=True)
    return path


def all_rows() -> dict[str, list[dict[str, Any]]]:
    """Return every row of the database, by the names of the tables."""
    with all_tenants_scope(BypassReason.COMMAND):
        return {
            model._meta.db_table: list(model._base_manager.order_by("pk").values())
            for model in apps.get_models()
            if model._meta.managed
        }


def demo() -> Tenant:
    return unscoped(Tenant).get(is_demo=True)


def key() -> ApiKey:
    (row,) = of(ApiKey, demo())
    return row


def user(who: str) -> User:
    return User.objects.get(email=f"{who}@millrace.local")


def another_operator() -> None:
    User.objects.create_superuser("second@example.com", "a password of their own")


def set_password(who: str) -> None:
    row = user(who)
    row.set_password("one they chose themselves")
    row.save()


def change_email(who: str) -> None:
    User.objects.filter(pk=user(who).pk).update(email="renamed@example.com")


def deactivate(who: str) -> None:
    another_operator()
    actions.do_deactivate_user(user(who))


def revoke_operator() -> None:
    another_operator()
    actions.do_revoke_operator(user("operator"))


def replace_owner() -> None:
    actions.do_add_member(demo(), User.objects.create_user("new-owner@example.com"), "owner")
    actions.do_remove_member(of(Membership, demo(), user=user("owner"))[0])


def rename_tenant() -> None:
    with all_tenants_scope(BypassReason.COMMAND):
        Tenant.objects.all_tenants().update(slug="acme", name="Acme")


def purge_tenant() -> None:
    tenant = demo()
    actions.do_delete_tenant(tenant)
    actions.do_purge_tenant(tenant, now=datetime.now(UTC) + timedelta(days=400))


def rename_project() -> None:
    with all_tenants_scope(BypassReason.COMMAND):
        Project.objects.all_tenants().update(slug="other", name="Other")


def change_price() -> None:
    price = NewPrice(MODEL, Tier.STANDARD, Component.OUTPUT, 1)
    do_publish_prices(do_propose_prices(Proposal((price,))), by=None)


def assign_book() -> None:
    PriceBook.objects.create(name="own", currency="USD")
    do_assign_book(demo(), "own")


def remove_all_deployments() -> None:
    for spec in served_specs():
        do_remove_deployment(spec.name)


def replace_deployment() -> None:
    do_remove_deployment(MODEL)
    do_add_deployment(MODEL, "embedded", pools={"mine": 2})


CHANGES: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "key revoked": lambda: actions.do_revoke_api_key(key()),
    "key renamed": lambda: actions.do_update_api_key(key(), name="Production"),
    "key's scopes narrowed": lambda: actions.do_update_api_key(key(), scopes=("inference",)),
    "key rotated": lambda: actions.do_rotate_api_key(key(), overlap=timedelta(0)),
    "operator's password changed": lambda: set_password("operator"),
    "operator's email changed": lambda: change_email("operator"),
    "operator renamed": lambda: actions.do_rename_user(user("operator"), "Ada"),
    "operator deactivated": lambda: deactivate("operator"),
    "operator's rights revoked": revoke_operator,
    "operator's password reset": lambda: manage("reset_password", "operator@millrace.local"),
    "owner's password changed": lambda: set_password("owner"),
    "owner's email changed": lambda: change_email("owner"),
    "owner deactivated": lambda: deactivate("owner"),
    "owner made an operator": lambda: actions.do_grant_operator(user("owner")),
    "owner removed": replace_owner,
    "tenant renamed": rename_tenant,
    "tenant suspended": lambda: actions.do_suspend_tenant(demo()),
    "tenant deleted": lambda: actions.do_delete_tenant(demo()),
    "tenant purged": purge_tenant,
    "project renamed": rename_project,
    "policy changed": lambda: actions.do_publish_policy(
        demo(), "smollm2", {"rules": [{"targets": [{"model": MODEL}]}]}
    ),
    "policy withdrawn": lambda: actions.do_withdraw_policy(demo(), "smollm2"),
    "limits set": lambda: actions.do_set_limits(demo(), {"requests_per_minute": 5}),
    "price changed": change_price,
    "price book assigned": assign_book,
    "deployment changed": lambda: do_update_deployment(MODEL, max_model_len=512),
    "deployment unloaded": lambda: do_set_deployment_state(MODEL, WantedState.UNLOADED),
    "deployment removed": lambda: do_remove_deployment(MODEL),
    "deployment replaced": replace_deployment,
    "all deployments removed": remove_all_deployments,
}


def test_the_first_start_creates_an_operator_and_the_demo_tenant(credentials: Path, row: Any) -> None:
    accounts = start()
    assert list(accounts) == [
        *("operator_email", "operator_password", "owner_email", "owner_password", "demo_key", "tenant")
    ]
    operator, owner = user("operator"), user("owner")
    assert (operator.is_staff, operator.is_superuser, owner.is_staff) == (True, True, False)
    assert operator.check_password(accounts["operator_password"])
    assert owner.check_password(accounts["owner_password"])
    assert list(unscoped(Membership).values_list("user__email", "role")) == [(owner.email, "owner")]
    assert set(row(accounts["demo_key"]).scopes) == {"inference", "manage", "models"}
    assert (row(accounts["demo_key"]).tenant_id, accounts["tenant"], demo().slug) == (demo().pk, "demo", "demo")
    assert row(accounts["demo_key"]).policies["smollm2"].models == ("smollm2-135m", "smollm2-135m-int8")
    assert stat.S_IMODE(credentials.stat().st_mode) == 0o600
    assert json.loads(credentials.read_text()) == accounts


def test_a_setting_leaves_the_demo_tenant_out(credentials: Path, settings: Any) -> None:
    settings.MILLRACE = replace(settings.MILLRACE, demo_tenant=False)
    accounts = start()
    assert list(accounts) == ["operator_email", "operator_password"]
    assert json.loads(credentials.read_text()) == accounts
    assert [user.email for user in User.objects.all()] == ["operator@millrace.local"]
    assert unscoped(Tenant).count() == 0
    settings.MILLRACE = replace(settings.MILLRACE, demo_tenant=True)
    assert start() == accounts
    assert unscoped(Tenant).count() == 0


def test_a_platform_with_an_operator_gets_no_other_account(credentials: Path) -> None:
    another_operator()
    assert start() == {}
    assert (User.objects.count(), unscoped(Tenant).count(), credentials.exists()) == (1, 0, False)


def test_a_first_start_that_ends_before_its_commit_is_repeated(credentials: Path, row: Any) -> None:
    class Killed(BaseException):
        pass

    with pytest.raises(Killed), transaction.atomic():
        start()
        raise Killed
    lost = json.loads(credentials.read_text())
    accounts = start()
    assert accounts["demo_key"] != lost["demo_key"]
    assert json.loads(credentials.read_text()) == accounts
    assert row(accounts["demo_key"]).tenant_id == demo().pk
    assert user("operator").check_password(accounts["operator_password"])


@pytest.mark.django_db(transaction=True)
def test_concurrent_first_starts_agree(credentials: Path) -> None:
    start_all = threading.Barrier(4)

    def run(_: int) -> dict[str, str]:
        try:
            start_all.wait()
            return dict(json.loads(manage("bootstrap")))
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, range(4))) == [json.loads(credentials.read_text())] * 4
    assert (unscoped(Tenant).count(), User.objects.count(), unscoped(ApiKey).count()) == (1, 2, 1)


@pytest.mark.parametrize("change", CHANGES)
def test_a_later_start_restores_nothing(credentials: Path, change: str) -> None:
    start()
    CHANGES[change]()
    rows, text = all_rows(), credentials.read_text()
    start()
    assert (all_rows(), credentials.read_text()) == (rows, text)
    credentials.write_text("[")
    start()
    assert (all_rows(), credentials.read_text()) == (rows, "[")
    credentials.unlink()
    start()
    assert all_rows() == rows
    assert not credentials.exists()


OPERATOR, OWNER, KEY = (
    {"operator_email", "operator_password"},
    {"owner_email", "owner_password"},
    {"demo_key", "tenant"},
)


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ("nothing", set()),
        ("key revoked", KEY),
        ("key renamed", set()),
        ("tenant suspended", KEY),
        ("tenant deleted", KEY),
        ("tenant purged", KEY),
        ("operator's email changed", OPERATOR),
        ("operator deactivated", OPERATOR),
        ("operator's rights revoked", OPERATOR),
        ("owner deactivated", OWNER),
    ],
)
def test_a_later_start_reports_the_accounts_that_still_exist(credentials: Path, change: str, missing: set[str]) -> None:
    first = start()
    CHANGES[change]()
    assert start() == {name: value for name, value in first.items() if name not in missing}
    credentials.unlink()
    assert start() == {}


@pytest.mark.django_db(transaction=True)
def test_without_deployments_nothing_is_served_until_the_setting_changes(
    broker: redis.Redis, credentials: Path
) -> None:
    start()
    remove_all_deployments()
    broker.delete(WANTED_KEY)  # Valkey lost its data, so that workers would load the models of the settings
    start()
    assert copy_deployments() == 0
    payload: Any = broker.get(WANTED_KEY)
    assert (served_specs(), decode_wanted(payload).deployments) == ((), ())
    do_add_deployment("llama", "/models/llama")
    assert [row.name for row in unscoped(Deployment).all()] == ["llama"]
    specs = settings.MILLRACE.models
    changed = replace(specs[0], max_model_len=512)
    do_import_settings((changed, *specs[1:]))
    assert [row.name for row in unscoped(Deployment).all()] == ["llama", changed.name]
    do_import_settings(())
    do_import_settings(specs)  # a setting that was removed and is added again is a change
    assert {row.name for row in unscoped(Deployment).all()} == {"llama", *(spec.name for spec in specs)}


def test_a_lost_password_is_reset_by_a_command(credentials: Path, client: Client) -> None:
    start()
    operator = user("operator")
    client.force_login(operator)
    password = manage("reset_password", " Operator@Millrace.local").strip()
    assert len(password) >= 20
    assert user("operator").check_password(password)
    assert client.get("/operator/").status_code == 302  # the session has ended
    entry = unscoped(AuditEntry).get(action="user.password_reset")
    assert (entry.object_id, entry.before, entry.after) == (operator.pk, None, None)
    assert manage("reset_password", operator.email).strip() != password


@pytest.mark.parametrize(
    ("email", "message"),
    [("nobody@example.com", "Operators: second@example.com"), ("operator@millrace.local", "deactivated")],
)
def test_a_password_that_cannot_be_reset_is_an_error(credentials: Path, email: str, message: str) -> None:
    start()
    deactivate("operator")
    with pytest.raises(CommandError, match=message):
        manage("reset_password", email)
