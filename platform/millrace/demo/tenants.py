"""The demo tenants with their users, keys, budgets and limits. All are invented and have `(demo)` in their names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from billing.amounts import NANO_A_DOLLAR
from billing.pricing.pricing import Component, Tier


@dataclass(frozen=True)
class DemoWorkload:
    """The usage of a key: its share of the tenant's requests and the sizes of a typical request."""

    share: int  # of the tenant's requests, relative to other keys
    prompt: int  # tokens, the median
    output: int
    model: Literal["first", "second", "embedding"] = "first"  # see DemoModels
    tier: Tier = Tier.STANDARD
    reused: float = 0.6  # of the prompt, read from the cache after the learning period
    writes: Component | None = None  # the type of its cache writes


@dataclass(frozen=True)
class BudgetSpec:
    """A budget of the tenant, a project, a key or a member.

    An integer `amount` is in nano-USD, tokens or requests. A float is a multiple of the usage in the time of `of`: this
    month, the last 30 days, or ever.
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

    def email(self, user_key: str) -> str:
        return f"{user_key}@{self.slug}.example"


HARBOR = TenantSpec(
    slug="demo-harbor",
    name="Harbor Books (demo)",
    country="DE",
    city="Bremen",
    people={
        "owner": DemoUser("Hanna Brandt", "owner"),
        "admin": DemoUser("Levin Ott", "admin"),
        "dev": DemoUser("Noor Saleh", "developer"),
        "books": DemoUser("Greta Falk", "billing"),
        "guest": DemoUser("Emil Voss", "readonly"),
    },
    projects={"default": "Default", "search": "Shelf search"},
    keys=(
        KeySpec(
            "Shop assistant",
            DemoWorkload(6, 900, 180, writes=Component.CACHE_WRITE_5M),
            by="dev",
            budgets=(BudgetSpec("Assistant, tokens a day", "tokens", "day", 500_000),),
            limits={"requests_per_minute": 600, "concurrency": 32},
        ),
        KeySpec("Nightly blurbs", DemoWorkload(2, 1500, 420, model="second", tier=Tier.BATCH, reused=0.3), by="dev"),
        KeySpec("Search", DemoWorkload(3, 60, 0, model="embedding", reused=0.0), project="search", by="admin"),
        KeySpec("Staging", DemoWorkload(1, 500, 120), by="dev", expires_in_days=20, first_model_only=True),
        KeySpec("Old laptop", by="admin", revoked=True),
    ),
    budgets=(
        BudgetSpec("The month", "money", "month", 1.6, of="days"),
        BudgetSpec(
            "Noor, watched",
            "money",
            "month",
            60 * NANO_A_DOLLAR,
            mode="soft",
            member="dev",
            rollover_limit=20 * NANO_A_DOLLAR,
        ),
    ),
    limits={"requests_per_minute": 1200, "tokens_per_day": 90_000_000},
    volume=1.3,
    routed=True,
)
LANTERN = TenantSpec(
    slug="demo-lantern",
    name="Lantern Clinic (demo)",
    country="US",
    city="Portland",
    people={
        "owner": DemoUser("Ruth Okafor", "owner"),
        "dev": DemoUser("Sam Whitlock", "developer"),
        "books": DemoUser("Ida Marsh", "billing"),
    },
    projects={"default": "Default", "letters": "Letters"},
    keys=(
        KeySpec("Triage notes", DemoWorkload(4, 1800, 260, writes=Component.CACHE_WRITE_1H), by="dev"),
        KeySpec("Letter drafts", DemoWorkload(2, 700, 520, model="second"), project="letters", by="dev"),
        KeySpec("Urgent", DemoWorkload(1, 400, 90, tier=Tier.PRIORITY), by="owner", limits={"max_output_tokens": 512}),
    ),
    budgets=(BudgetSpec("Monthly cap", "money", "month", 1.06, reduce_max_tokens=True),),
    operator_limits={"requests_per_minute": 900},
    welcome=25 * NANO_A_DOLLAR,
)
COPPER = TenantSpec(
    slug="demo-copper",
    name="Copper Kettle Games (demo)",
    country="FR",
    city="Lyon",
    people={
        "owner": DemoUser("Anaïs Girard", "owner"),
        "dev": DemoUser("Tomas Lind", "developer"),
    },
    keys=(
        KeySpec("Village dialogue", DemoWorkload(5, 600, 240), by="dev", limits={"requests_per_minute": 60}),
        KeySpec(
            "Quest writer",
            DemoWorkload(2, 2400, 700, model="second", tier=Tier.FLEX, reused=0.4),
            by="dev",
            budgets=(BudgetSpec("Quests a day", "requests", "day", 100, mode="dry_run"),),
        ),
    ),
    budgets=(BudgetSpec("Pilot", "money", "lifetime", 0.97, of="ever"),),
    volume=0.8,
    vat_id="FR12000000000",
)
MEADOW = TenantSpec(
    slug="demo-meadow",
    name="Meadow Research (demo)",
    country="NL",
    city="Utrecht",
    people={
        "owner": DemoUser("Jaap Verhoef", "owner"),
        "admin": DemoUser("Mira Castell", "admin"),
        "dev": DemoUser("Ola Nyberg", "developer"),
    },
    projects={"default": "Default", "papers": "Paper reader"},
    keys=(
        KeySpec(
            "Paper reader",
            DemoWorkload(4, 3200, 300, reused=0.75, writes=Component.CACHE_WRITE_1H),
            project="papers",
            by="dev",
            budgets=(
                BudgetSpec(
                    "Reader, a month", "money", "month", 75 * NANO_A_DOLLAR, temporary_increase=25 * NANO_A_DOLLAR
                ),
                BudgetSpec("Reader, a trial", "money", "day", 2 * NANO_A_DOLLAR, mode="dry_run"),
            ),
        ),
        KeySpec("Corpus vectors", DemoWorkload(3, 240, 0, model="embedding", reused=0.0), project="papers", by="admin"),
        KeySpec("Notebook", DemoWorkload(1, 800, 350, reused=0.2), by="dev", limits={"tokens_per_minute": 200_000}),
    ),
    budgets=(BudgetSpec("Requests a day", "requests", "day", 1_000),),
    limits={"concurrency": 64, "long_prompt_threshold": 6000, "long_prompt_concurrency": 4},
    vat_id="NL123456789B13",
)
BLANK = TenantSpec(
    slug="demo-blank",
    name="Blank Page (demo)",
    country="DE",
    city="Kiel",
    people={"owner": DemoUser("Pia Sommer", "owner")},
)
CAST = (HARBOR, LANTERN, COPPER, MEADOW, BLANK)
