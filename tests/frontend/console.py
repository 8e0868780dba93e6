"""What the tests of the console's screens share: the registry of screens, and the world they are shown in.

A screen is registered by a module in tests/frontend/screens, see docs/console.md.
"""

from __future__ import annotations

import importlib
import pkgutil
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from inference_worker.contract.messages import BillingContext, ExecutionUsage, encode
from inference_worker.contract.request import TokenUsage

if TYPE_CHECKING:
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
PASSWORD = "correct horse battery staple"
# Each state is a tenant of its own. "error": every panel of the populated one fails.
SLUGS = MappingProxyType({"populated": "acme", "empty": "bare", "over": "spent"})
STATES = (*SLUGS, "error")


class Undefined(str):
    """What Django puts for an undefined name: here, a failure."""

    def __mod__(self, name: Any) -> str:
        raise AssertionError(f"a template asks for {name!r}, which is not there")

    def __contains__(self, part: object) -> bool:
        return part == "%s"


def meter(tenant: Tenant, **changes: Any) -> str:
    """Meter one execution for a tenant, as the settler does; gives the request's id."""
    from billing.metering.ingest import UsageMessage, settle  # here: this file is read before Django is set up

    at = changes.pop("at", datetime.now(UTC))
    counts = {name: changes.pop(name, 0) for name in TokenUsage.__dataclass_fields__}
    request_id = changes.pop("request_id", f"req_{secrets.token_hex(16)}")
    billing_context = BillingContext(
        admitted_at=int(at.timestamp()) * 1_000_000 + at.microsecond,
        request_id=request_id,
        execution=0,
        tenant_id=tenant.pk,
        project_id=changes.pop("project_id", 1),
        key_id=changes.pop("key_id", 1),
        model=changes.pop("model", "smollm2-135m"),
        price_version=changes.pop("price_version", None),
    )
    fields = {"attempt": 1, "outcome": "completed", "finish_reason": "stop", "replica_id": "r", "block_size": 32}
    event = ExecutionUsage(billing_context=billing_context, usage=TokenUsage(**counts), **(fields | changes))
    assert settle([UsageMessage("1-0", encode(event))]).settled == 1
    return request_id


@dataclass
class World:
    """Three tenants and two people. A screen's `prepare` adds to `rows` what its address names."""

    tenants: dict[str, Tenant]  # by state
    projects: dict[str, Project]
    keys: dict[str, list[ApiKey]]
    owner: User  # of all three
    operator: User
    price_version: int
    rows: dict[str, Any] = field(default_factory=dict)

    def person(self, who: str) -> User:
        return self.operator if who == "operator" else self.owner


@dataclass(frozen=True)
class Screen:
    """One page and what it is held to.

    url: may name `{slug}` and what `prepare` puts into `world.rows` as "<state>.<name>" (then `{name}` in the address).
    queries: the most queries its page may cost, in any state. who: "owner" or "operator".
    """

    name: str
    url: str
    queries: int
    who: str = "owner"
    states: tuple[str, ...] = STATES
    ready: str = "h1"  # a selector of what must be there

    def address(self, world: World, state: str) -> str:
        shown = "populated" if state == "error" else state
        prefix = f"{shown}."
        rows = {name.removeprefix(prefix): row for name, row in world.rows.items() if name.startswith(prefix)}
        return self.url.format(slug=SLUGS[shown], **rows)


Prepare = Callable[[World], None]
SCREENS: list[Screen] = []
PREPARE: list[Prepare] = []
# For the screenshots: what stands in an address for the demo tenant, by its name there.
DEMO: dict[str, Callable[[Any], object]] = {}
# For the arguments of addresses below /t/<slug>/: the value that belongs to another tenant, for the 404 test.
THEIRS: dict[str, Callable[[World], object]] = {}


def register(
    *screens: Screen,
    prepare: Prepare | None = None,
    theirs: Mapping[str, Callable[[World], object]] | None = None,
    demo: Mapping[str, Callable[[Any], object]] | None = None,
) -> None:
    """Have the table-driven tests look at these screens. `prepare` makes what they show, after the tenants' usage.

    `demo`: for what the address names, from the demo tenant to its value (inside that tenant's scope).
    """
    SCREENS.extend(screens)
    THEIRS.update(theirs or {})
    DEMO.update(demo or {})
    if prepare:
        PREPARE.append(prepare)


def load_screens() -> list[Screen]:
    """Every registered screen."""
    from tests.frontend import screens

    for module in pkgutil.iter_modules(screens.__path__, f"{screens.__name__}."):
        importlib.import_module(module.name)
    return SCREENS


def make_world() -> World:
    """The world, committed. One tenant is busy, one has nothing, one has spent its budget."""
    from tenants import actions
    from tenants.models import User
    from tests.billing import books
    from tests.seeing import only_project

    owner = User.objects.create_user("owner@example.com", PASSWORD, name="Olive Owner")
    operator = User.objects.create_superuser("op@example.com", PASSWORD, name="Otto Operator")
    names = {"populated": "Acme Robotics", "empty": "Bare Ground", "over": "Spent Ltd"}
    tenants = {state: actions.do_create_tenant(SLUGS[state], name) for state, name in names.items()}
    for tenant in tenants.values():
        actions.do_add_member(tenant, owner, "owner")
    projects = {state: only_project(tenant) for state, tenant in tenants.items()}
    world = World(tenants, projects, {"empty": []}, owner, operator, books.sheet())
    for state in ("populated", "over"):
        world.keys[state] = [
            actions.do_create_api_key(projects[state], name)[0] for name in ("prod-support", "prod-search", "łódź-eval")
        ]
        _fill(world, state)
    for prepare in PREPARE:
        prepare(world)
    return world


def _fill(world: World, state: str) -> None:
    """An execution or two a day of this month, of every outcome."""
    now = datetime.now(UTC)
    tenant, keys, project = world.tenants[state], world.keys[state], world.projects[state]
    given = {"project_id": project.pk, "price_version": world.price_version}
    for ago in range(min(now.day, 12)):
        at = (now - timedelta(days=ago)).replace(hour=0, minute=0, second=1)
        counts = {"uncached": 900_000 + 70_000 * ago, "cache_read": 1_400_000 - 50_000 * ago, "output": 210_000}
        meter(tenant, at=at, key_id=keys[ago % 2].pk, ttft_us=184_000, duration_us=1_250_000, **counts, **given)
    meter(tenant, key_id=keys[2].pk, outcome="cancelled", uncached=12, output=3, finish_reason="cancelled", **given)
    meter(tenant, key_id=keys[2].pk, outcome="failed", finish_reason="error", **given)


def remembered(session: Any) -> None:
    """Let a session count as one that was proved to be its person's just now."""
    session["account_authentication_methods"] = [{"method": "password", "at": time.time(), "reauthenticated": True}]
    session["account_authentication_methods_user"] = session["_auth_user_id"]
    session.save()
