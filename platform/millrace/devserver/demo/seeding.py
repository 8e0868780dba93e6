"""Sets the stage: tenants, people, keys, limits, prices. Each thing is made unless it is there, so a run that was cut
short is taken up by the next; what somebody has changed since stays changed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from django.db import transaction

from billing import demo_prices
from billing.actions.prices import do_assign_book, do_propose_prices, do_publish_prices
from billing.actions.setup import do_add_entity, do_add_tax_rule, do_assign_entity, do_set_profile
from billing.models import BillingEntity, BillingProfile, PriceBookAssignment, PriceVersion, TaxRule
from billing.pricing.price_book import NewPrice, Proposal, nano_per_million
from billing.pricing.pricing import Component, Tier
from inference_worker.contract.settings import ModelSpec
from millrace.devserver.demo.tenants import KeySpec, TenantSpec
from millrace.devserver.state_file import write_private
from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import ApiKey, LimitSet, Membership, Project, RoutingPolicy, Tenant, User

BOOK = ENTITY = "demo"
SECRETS_FILE = "demo_keys.json"  # in the data directory
NAME = "assistant"  # the model name of its own that a tenant may have
_MARKUP = {Tier.PRIORITY: 3, Tier.FLEX: 1}  # in halves of the standard price; every price is written out
_DEARER_OUTPUT = "18"  # of the second model, until last month


@dataclass(frozen=True)
class DemoModels:
    """The names of the platform's models, as the cast uses them."""

    generating: tuple[str, ...]
    embedding: tuple[str, ...]

    def named(self, which: str) -> str | None:
        """Return the model that stands for `first`, `second` or `embedding`; None: the platform has none of the
        kind."""
        found = self.embedding if which == "embedding" else self.generating
        return found[min(which == "second", len(found) - 1)] if found else None

    @classmethod
    def of(cls, specs: tuple[ModelSpec, ...]) -> DemoModels:
        embeds = [spec.source == "embedded:minilm" for spec in specs]
        return cls(
            tuple(spec.name for spec, embeds_ in zip(specs, embeds, strict=True) if not embeds_),
            tuple(spec.name for spec, embeds_ in zip(specs, embeds, strict=True) if embeds_),
        )


@dataclass
class DemoTenant:
    """A demo tenant as it stands."""

    spec: TenantSpec
    tenant: Tenant
    people: dict[str, User] = field(default_factory=dict)
    projects: dict[str, Project] = field(default_factory=dict)
    keys: dict[str, ApiKey] = field(default_factory=dict)


class Secrets:
    """The demo keys' secrets, by tenant and key, in a private file: the live requests need them."""

    def __init__(self, data_dir: Path) -> None:
        self.path = data_dir / SECRETS_FILE
        try:
            self._kept: dict[str, str] = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self._kept = {}

    def get(self, player: DemoTenant, key: str) -> str | None:
        return self._kept.get(f"{player.spec.slug}/{key}")

    def keep(self, player: DemoTenant, key: str, secret: str) -> None:
        self._kept[f"{player.spec.slug}/{key}"] = secret
        write_private(self.path, json.dumps(self._kept, indent=2) + "\n")


def real_tenants() -> list[str]:
    """Return the slugs of tenants that are no demo, nor gone."""
    with all_tenants_scope(BypassReason.COMMAND):
        real = Tenant.objects.all_tenants().filter(is_demo=False).exclude(status=Tenant.Status.PURGED)
        return list(real.values_list("slug", flat=True))


def enter(spec: TenantSpec, secrets: Secrets, models: DemoModels, password: str | None) -> DemoTenant:
    """Return the tenant with its people, projects, keys and limits; its budgets come once prices are known."""
    with all_tenants_scope(BypassReason.COMMAND):
        tenant = Tenant.objects.all_tenants().filter(slug=spec.slug).first()
    if tenant is None:
        tenant = actions.do_create_tenant(spec.slug, spec.name, is_demo=True)
    player = DemoTenant(spec, tenant)
    for who in spec.people:
        player.people[who] = _person(player, who, password)
    with tenant_scope(tenant):
        known = {project.slug: project for project in Project.objects.for_tenant(tenant)}
    for slug, name in {"default": "Default", **spec.projects}.items():
        player.projects[slug] = known.get(slug) or actions.do_create_project(tenant, slug, name)
    for key in spec.keys:
        player.keys[key.name] = _key(player, key, secrets, models)
    _limit(player, spec.limits)
    _limit(player, spec.operator_limits, set_by_operator=True)
    if spec.routed:
        _route(player, models)
    return player


def _person(player: DemoTenant, who: str, password: str | None) -> User:
    person, email = player.spec.people[who], player.spec.email(who)
    user = User.objects.filter(email=email).first() or User.objects.create_user(email, password, name=person.name)
    if password is not None and not user.check_password(password):
        user.set_password(password)
        user.save(update_fields=["password"])
    with tenant_scope(player.tenant):
        member = Membership.objects.for_tenant(player.tenant).filter(user=user).exists()
    if not member:
        actions.do_add_member(player.tenant, user, person.role)
    return user


def _key(player: DemoTenant, spec: KeySpec, secrets: Secrets, models: DemoModels) -> ApiKey:
    project = player.projects[spec.project]
    with tenant_scope(player.tenant):
        key = ApiKey.objects.for_tenant(player.tenant).filter(project=project, name=spec.name).order_by("pk").first()
    if key is None:
        expires_at = spec.expires_in_days and datetime.now(UTC) + timedelta(days=spec.expires_in_days)
        with transaction.atomic():
            key, secret = actions.do_create_api_key(
                project,
                spec.name,
                allowed_models=models.generating[:1] if spec.first_model_only else None,
                expires_at=expires_at or None,
                created_by=player.people[spec.by],
            )
            if spec.work is not None:
                secrets.keep(player, spec.name, secret)  # before the commit: rows whose secret nobody has are no use
    _limit(player, spec.limits, key=key)
    if spec.revoked:
        actions.do_revoke_api_key(key)
    return key


def _limit(
    player: DemoTenant, limits: dict[str, int], *, key: ApiKey | None = None, set_by_operator: bool = False
) -> None:
    if not limits:
        return
    with tenant_scope(player.tenant):
        known = LimitSet.objects.for_tenant(player.tenant).filter(
            key=key, project=None, set_by_operator=set_by_operator
        )
        if known.exists():
            return
    actions.do_set_limits(player.tenant, limits, key=key, set_by_operator=set_by_operator)


def _route(player: DemoTenant, models: DemoModels) -> None:
    """Two versions of a policy, so that there is something to compare and go back to."""
    with tenant_scope(player.tenant):
        known = RoutingPolicy.objects.for_tenant(player.tenant).filter(name=NAME).count()
    first, second = models.named("first"), models.named("second")
    one: dict[str, Any] = {"rules": [{"targets": [{"model": first}]}]}
    two: dict[str, Any] = {"rules": [{"targets": [{"model": first, "weight": 9}, {"model": second}]}]}
    for body in [one] if first == second else [one, two][known:]:
        actions.do_publish_policy(player.tenant, NAME, body, created_by=player.people["owner"])


def bill(players: list[DemoTenant], models: DemoModels, began: date) -> BillingEntity:
    """Have the demo's own company bill them, by the demo's own price book: months and numbers of real tenants' invoices
    have nothing to do with it. `began`: the day before which nobody used anything."""
    with all_tenants_scope(BypassReason.COMMAND):
        entity = BillingEntity.objects.filter(slug=ENTITY).first()
    entity = entity or do_add_entity(
        slug=ENTITY,
        name="Millrace Demo Ltd",
        street="1 Example Street",
        postcode="00000",
        city="Exampleton",
        country="IE",
        vat_id="IE0000000AA",
        email="billing@millrace-demo.example",
        invoice_prefix="DEMO",
        credit_note_prefix="DEMO-CN",
        payment_details="This is a demo: pay nothing.",
    )
    _tax(entity)
    for player in players:
        with tenant_scope(player.tenant):
            profile = BillingProfile.objects.for_tenant(player.tenant).first()
        if profile is None:
            spec = player.spec
            profile = do_set_profile(
                player.tenant,
                name=spec.name,
                street="2 Example Street",
                postcode="00000",
                city=spec.city,
                country=spec.country,
                vat_id=spec.vat_id,
                emails=[spec.email("books" if "books" in spec.people else "owner")],
            )
        if profile is None or profile.entity_id != entity.pk:
            do_assign_entity(player.tenant, entity)
    _price(players, models, began)
    return entity


def _tax(entity: BillingEntity) -> None:
    since = date(2020, 1, 1)
    rules: list[dict[str, Any]] = [
        {"country": "FR", "buyer": "business", "category": "AE"},
        {"country": "NL", "buyer": "business", "category": "AE"},
        {"country": "DE", "buyer": "", "category": "S", "rate_ppm": 190_000},
        {"country": "", "buyer": "", "category": "O", "label": "Tax"},
    ]
    with all_tenants_scope(BypassReason.COMMAND):
        known = set(TaxRule.objects.filter(entity=entity).values_list("country", "buyer"))
    for rule in rules:
        if (rule["country"], rule["buyer"]) not in known:
            do_add_tax_rule(entity=entity, starts_on=since, **rule)


def _price(players: list[DemoTenant], models: DemoModels, began: date) -> None:
    """NOTE: the book is everybody's before it has prices: publishing then makes rate cards for all of them from `began`
    on, where assigning later would make them from now on."""
    first, second = models.named("first"), models.named("second")
    with all_tenants_scope(BypassReason.COMMAND):
        versions = list(PriceVersion.objects.filter(book__name=BOOK).order_by("pk"))
        assigned = set(PriceBookAssignment.objects.all_tenants().values_list("tenant_id", flat=True))
    old = _all_prices(models)
    if second != first:
        old = [_dearer(price) if price.model == second else price for price in old]
    opened = datetime(began.year - 1, 1, 1, tzinfo=UTC)
    draft = (
        versions[0]
        if versions
        else do_propose_prices(Proposal(tuple(old)), book=BOOK, effective_from=opened, note="Demo prices")
    )
    for player in players:
        if player.tenant.pk not in assigned:
            do_assign_book(player.tenant, BOOK)
    if draft.state == PriceVersion.State.DRAFT:
        do_publish_prices(draft, by=None)
    if second != first and len(versions) < 2:
        new = tuple(price for price in _all_prices(models) if price.model == second)
        changed = datetime.combine(began.replace(day=1) + timedelta(days=32), datetime.min.time(), UTC).replace(day=1)
        note = f"Demo prices: {second} is cheaper"
        do_publish_prices(do_propose_prices(Proposal(new), book=BOOK, effective_from=changed, note=note), by=None)


def _all_prices(models: DemoModels) -> list[NewPrice]:
    prices = list(demo_prices.proposal(models.generating, models.embedding).prices)
    for tier, halves in _MARKUP.items():
        prices += [
            NewPrice(model, tier, component, nano_per_million(usd) * halves // 2)
            for model in models.generating
            for component, usd in demo_prices.GENERATION.items()
        ]
    return prices


def _dearer(price: NewPrice) -> NewPrice:
    if (price.tier, price.component) != (Tier.STANDARD, Component.OUTPUT):
        return price
    return NewPrice(price.model, price.tier, price.component, nano_per_million(_DEARER_OUTPUT))
