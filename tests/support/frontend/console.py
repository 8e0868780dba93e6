"""The registry of the console's screens, and the tenants that its tests show.

A screen is registered by a module in tests/support/frontend/screens, see docs/guides/console.md.
"""

from __future__ import annotations

import importlib
import pkgutil
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from inference_worker.contract.messages import BillingContext, ExecutionUsage, encode
from inference_worker.contract.request import TOKEN_COLUMNS, TokenCounts

if TYPE_CHECKING:
    from django.test import Client

    from tenants.models import ApiKey, Project, Tenant, User

# For Chromium, also in a container as root.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PASSKEY_URL = "http://localhost:8000"  # a public URL with a host name, which passkeys need
PASSWORD = "correct horse battery staple"
# Each state is a separate tenant. "error": every panel of the populated one fails.
SLUGS = MappingProxyType({"populated": "acme", "empty": "bare", "over": "spent"})
STATES = (*SLUGS, "error")


class Undefined(str):
    """A replacement for Django's value of an undefined name, which raises an error."""

    def __mod__(self, name: Any) -> str:
        raise AssertionError(f"a template asks for {name!r}, which is not there")

    def __contains__(self, part: object) -> bool:
        return part == "%s"


def meter(tenant: Tenant, **changes: Any) -> str:
    """Settle one execution of a tenant and return the request's ID."""
    from billing.metering.ingest import UsageMessage, settle  # here: this file is read before Django is set up

    at = changes.pop("at", datetime.now(UTC))
    counts = {name: changes.pop(name, 0) for name in TOKEN_COLUMNS}
    request_id = changes.pop("request_id", f"req_{secrets.token_hex(16)}")
    billing_context = BillingContext(
        admitted_at=int(at.timestamp()) * 1_000_000 + at.microsecond,
        request_id=request_id,
        execution=changes.pop("execution", 0),
        tenant_id=tenant.pk,
        project_id=changes.pop("project_id", 1),
        key_id=changes.pop("key_id", 1),
        model=changes.pop("model", "smollm2-135m"),
        price_version=changes.pop("price_version", None),
        end_user=changes.pop("end_user", ""),
    )
    fields = {"attempt": 1, "outcome": "completed", "finish_reason": "stop", "replica_id": "r", "block_size": 32}
    event = ExecutionUsage(billing_context=billing_context, usage=TokenCounts(**counts), **(fields | changes))
    assert settle([UsageMessage("1-0", encode(event))]).settled == 1
    return request_id


@dataclass
class World:
    """Three tenants and two users. A screen's `prepare` adds the objects of its URL to `rows`."""

    tenants: dict[str, Tenant]  # by state
    projects: dict[str, Project]
    keys: dict[str, list[ApiKey]]
    owner: User  # of all three
    operator: User
    price_version: int
    rows: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Screen:
    """One page and its requirements.

    url: may contain `{slug}`, and `{name}` for each entry "<state>.<name>" that `prepare` adds to `world.rows`.
    queries: the maximum number of queries of its page in any state, with those of a redirect to it.
    who: "owner", "operator", "visitor" (not signed in), or "pending" (asked for the second factor).
    has_layout: False for a page outside of the console, without navigation.
    public_url: MILLRACE_PUBLIC_URL while the page is shown, if the page depends on it.
    """

    name: str
    url: str
    queries: int
    who: str = "owner"
    states: tuple[str, ...] = STATES
    ready: str = "h1"  # a selector of a required element
    has_layout: bool = True
    public_url: str = ""

    def address(self, world: World, state: str) -> str:
        shown = "populated" if state == "error" else state
        prefix = f"{shown}."
        rows = {name.removeprefix(prefix): row for name, row in world.rows.items() if name.startswith(prefix)}
        return self.url.format(slug=SLUGS[shown], **rows)


Prepare = Callable[[World], None]
SCREENS: list[Screen] = []
PREPARE: list[Prepare] = []
# For the screenshots: the values in the demo tenant's URLs, by name.
DEMO: dict[str, Callable[[Any], object]] = {}
# For the arguments of URLs below /t/<slug>/: a value of another tenant, for the 404 test.
THEIRS: dict[str, Callable[[World], object]] = {}


def register(
    *screens: Screen,
    prepare: Prepare | None = None,
    theirs: Mapping[str, Callable[[World], object]] | None = None,
    demo: Mapping[str, Callable[[Any], object]] | None = None,
) -> None:
    """Register these screens for the table-driven tests. `prepare` creates their content, after the tenants' usage.

    `demo`: for each name in the URL, a function from the demo tenant to the value, called in the tenant's scope.
    """
    SCREENS.extend(screens)
    THEIRS.update(theirs or {})
    DEMO.update(demo or {})
    if prepare:
        PREPARE.append(prepare)


def load_screens() -> list[Screen]:
    """Return all registered screens."""
    from tests.support.frontend import screens

    for module in pkgutil.iter_modules(screens.__path__, f"{screens.__name__}."):
        importlib.import_module(module.name)
    return SCREENS


def make_world() -> World:
    """Create and commit the tenants: one with usage, one empty, and one with an exhausted budget."""
    from tenants import actions
    from tenants.models import User
    from tests.support.billing import books
    from tests.support.rows import only_project

    owner = User.objects.create_user("owner@example.com", PASSWORD, name="Olive Owner")
    operator = User.objects.create_superuser("op@example.com", PASSWORD, name="Otto Operator")
    names = {"populated": "Acme Robotics", "empty": "Bare Ground", "over": "Spent Ltd"}
    tenants = {state: actions.do_create_tenant(SLUGS[state], name) for state, name in names.items()}
    for tenant in tenants.values():
        actions.do_add_member(tenant, owner, "owner")
    projects = {state: only_project(tenant) for state, tenant in tenants.items()}
    world = World(tenants, projects, {"empty": []}, owner, operator, books.rate_card())
    books.rate_card("smollm2-135m-int8")
    for state in ("populated", "over"):
        world.keys[state] = [
            actions.do_create_api_key(projects[state], name)[0] for name in ("prod-support", "prod-search", "łódź-eval")
        ]
        _fill(world, state)
    for prepare in PREPARE:
        prepare(world)
    return world


def _fill(world: World, state: str) -> None:
    """Add one or two executions per day of this month, with every outcome."""
    now = datetime.now(UTC)
    tenant, keys, project = world.tenants[state], world.keys[state], world.projects[state]
    given = {"project_id": project.pk, "price_version": world.price_version}
    for ago in range(min(now.day, 12)):
        at = (now - timedelta(days=ago)).replace(hour=0, minute=0, second=1)
        counts = {"uncached": 900_000 + 70_000 * ago, "cache_read": 1_400_000 - 50_000 * ago, "output": 210_000}
        meter(tenant, at=at, key_id=keys[ago % 2].pk, ttft_us=184_000, duration_us=1_250_000, **counts, **given)
    meter(tenant, key_id=keys[2].pk, outcome="cancelled", uncached=12, output=3, finish_reason="cancelled", **given)
    meter(tenant, key_id=keys[2].pk, outcome="failed", finish_reason="error", **given)


def client_of(who: str, owner: User, operator: User) -> Client:
    """Return a client in the state of a screen's user, see `Screen.who`."""
    from django.test import Client  # here: Django is not set up on import

    client = Client()
    if who == "pending":
        _enter_password(client)
    elif who != "visitor":
        client.force_login(operator if who == "operator" else owner)
        remembered(client.session)
    return client


def _enter_password(client: Client) -> None:
    """Sign in as a user with a second factor, up to its page."""
    from allauth.mfa.totp.internal.auth import TOTP, generate_totp_secret

    from tenants.models import User

    user = User.objects.filter(email="factor@example.com").first()
    if user is None:
        user = User.objects.create_user("factor@example.com", PASSWORD)
        TOTP.activate(user, generate_totp_secret())
    response = client.post("/login", {"login": user.email, "password": PASSWORD})
    assert response.status_code == 302, "the password was not accepted"


@contextmanager
def shown_at(public_url: str) -> Iterator[None]:
    """Set MILLRACE_PUBLIC_URL, unless it is empty."""
    from django.conf import settings

    before = settings.MILLRACE
    settings.MILLRACE = replace(before, public_url=public_url or before.public_url)
    try:
        yield
    finally:
        settings.MILLRACE = before


def remembered(session: Any) -> None:
    """Mark a session as reauthenticated now."""
    session["account_authentication_methods"] = [{"method": "password", "at": time.time(), "reauthenticated": True}]
    session["account_authentication_methods_user"] = session["_auth_user_id"]
    session.save()
