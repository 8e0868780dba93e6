"""The demo tenants, which `tenants.toml` declares."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from billing.rates.pricing import Component, Tier


@dataclass(frozen=True)
class DemoWorkload:
    """The usage of a key: its share of the tenant's requests and the sizes of a typical request."""

    share: int  # weight among the tenant's keys
    prompt: int  # tokens, the median
    output: int
    model: Literal["first", "second", "embedding"] = "first"  # see DemoModels
    tier: Tier = Tier.STANDARD
    reused: float = 0.6  # share of the prompt that is read from the cache after the learning period
    writes: Component | None = None  # the type of its cache writes


@dataclass(frozen=True)
class BudgetSpec:
    """A budget of the tenant, a project, a key or a member.

    An integer `amount` is in nano-USD, tokens or requests. A float is a multiple of the usage in the time of `of`: the
    month with the most of it, the last 30 days, or ever.
    """

    name: str
    unit: Literal["money", "tokens", "requests"]
    period: Literal["day", "month", "lifetime"]
    amount: int | float
    mode: Literal["hard", "soft", "dry_run"] = "hard"
    reduce_max_tokens: bool = False
    member: str = ""
    temporary_increase: int = 0  # for a week
    rollover_limit: int = 0
    of: Literal["month", "days", "ever"] = "month"


@dataclass(frozen=True)
class KeySpec:
    name: str
    work: DemoWorkload | None = None  # None: never used
    project: str = "default"
    cost_center: str = ""
    by: str = "owner"
    budgets: tuple[BudgetSpec, ...] = ()
    limits: dict[str, int] = field(default_factory=dict)
    first_model_only: bool = False
    expires_in_days: int | None = None
    revoked: bool = False


@dataclass(frozen=True)
class DemoUser:
    name: str
    role: str


@dataclass(frozen=True)
class TenantSpec:
    slug: str
    name: str
    country: str
    city: str
    people: dict[str, DemoUser]
    projects: dict[str, str] = field(default_factory=dict)
    keys: tuple[KeySpec, ...] = ()
    budgets: tuple[BudgetSpec, ...] = ()
    limits: dict[str, int] = field(default_factory=dict)
    operator_limits: dict[str, int] = field(default_factory=dict)
    volume: float = 1.0  # requests, relative to other tenants
    welcome: int = 0  # promotional credit in last month, nano-USD
    vat_id: str = ""
    routed: bool = False  # has a routing policy
    instructions: str = ""  # system message of the live requests
    questions: tuple[str, ...] = ()

    def email(self, user_key: str) -> str:
        return f"{user_key}@{self.slug}.example"


CAST = msgspec.toml.decode(
    Path(__file__).with_suffix(".toml").read_bytes(), type=dict[Literal["tenants"], tuple[TenantSpec, ...]]
)["tenants"]
