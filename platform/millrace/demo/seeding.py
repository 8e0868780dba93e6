"""Creation of the demo tenants with their users, keys, limits and prices.

Existing objects are not changed, so a run that was interrupted is continued by the next one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from django.db import transaction

from billing.invoicing.setup import do_add_entity, do_add_tax_rule, do_assign_entity, do_set_profile
from billing.models import BillingEntity, BillingProfile, PriceBookAssignment, PriceVersion, TaxRule
from billing.pricing import demo_prices
from billing.pricing.prices import do_assign_book, do_propose_prices, do_publish_prices
from billing.rates.price_book import NewPrice, Proposal, nano_per_million
from billing.rates.pricing import Component, Tier
from inference_worker.checkpoints.encoder_config import model_task
from inference_worker.contract.settings import ModelSpec
from millrace.demo.tenants import KeySpec, TenantSpec
from millrace.environment.private_files import write_private
from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import ApiKey, LimitSet, Membership, Project, RoutingPolicy, Tenant, User

BOOK = ENTITY = "demo"
SECRETS_FILE = "demo_keys.json"  # in the data directory
NAME = "assistant"  # the logical model name of some tenants
_MARKUP = {Tier.PRIORITY: 3, Tier.FLEX: 1}  # in halves of the standard price
_OLD_OUTPUT_PRICE = "18"  # USD per million tokens of the second model before last month


@dataclass(frozen=True)
class DemoModels:
    """The names of the platform's models that the demo tenants use."""

    generating: tuple[str, ...]
    embedding: tuple[str, ...]

    def find_model(self, which: str) -> str | None:
        """Return the model for `first`, `second` or `embedding`, or None if the platform has none of this type."""
        models = self.embedding if which == "embedding" else self.generating
        return models[min(which == "second", len(models) - 1)] if models else None

    @classmethod
    def of(cls, specs: tuple[ModelSpec, ...]) -> DemoModels:
        tasks = {spec.name: model_task(spec.source) for spec in specs}
        return cls(
            tuple(name for name, task in tasks.items() if task == "generate"),
            tuple(name for name, task in tasks.items() if task == "embed"),
        )


@dataclass
class DemoTenant:
    """A demo tenant with its objects in the database."""

    spec: TenantSpec
    tenant: Tenant
    people: dict[str, User] = field(default_factory=dict)
    projects: dict[str, Project] = field(default_factory=dict)
    keys: dict[str, ApiKey] = field(default_factory=dict)


class Secrets:
    """The secrets of the demo keys, in a private file for the live requests."""

    def __init__(self, data_dir: Path) -> None:
        self.path = data_dir / SECRETS_FILE
        try:
            self._secrets: dict[str, str] = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self._secrets = {}

    def get(self, demo_tenant: DemoTenant, key: str) -> str | None:
        return self._secrets.get(f"{demo_tenant.spec.slug}/{key}")

    def store(self, demo_tenant: DemoTenant, key: str, secret: str) -> None:
        self._secrets[f"{demo_tenant.spec.slug}/{key}"] = secret
        write_private(self.path, json.dumps(self._secrets, indent=2) + "\n")


def real_tenants() -> list[str]:
    """Return the slugs of real tenants that are not deleted."""
    with all_tenants_scope(BypassReason.COMMAND):
        real = Tenant.objects.all_tenants().filter(is_demo=False).exclude(status=Tenant.Status.PURGED)
        return list(real.values_list("slug", flat=True))


def create_tenant(spec: TenantSpec, secrets: Secrets, models: DemoModels, password: str | None) -> DemoTenant:
    """Create the missing parts of a tenant: users, projects, keys and limits. Budgets are created by the backfill."""
    with all_tenants_scope(BypassReason.COMMAND):
        tenant = Tenant.objects.all_tenants().filter(slug=spec.slug).first()
    if tenant is None:
        tenant = actions.do_create_tenant(spec.slug, spec.name, is_demo=True)
    demo_tenant = DemoTenant(spec, tenant)
    for user_key in spec.people:
        demo_tenant.people[user_key] = _person(demo_tenant, user_key, password)
    with tenant_scope(tenant):
        known = {project.slug: project for project in Project.objects.for_tenant(tenant)}
    for slug, name in {"default": "Default", **spec.projects}.items():
        demo_tenant.projects[slug] = known.get(slug) or actions.do_create_project(tenant, slug, name)
    for key in spec.keys:
        demo_tenant.keys[key.name] = _key(demo_tenant, key, secrets, models)
    _limit(demo_tenant, spec.limits)
    _limit(demo_tenant, spec.operator_limits, set_by_operator=True)
    if spec.routed:
        _route(demo_tenant, models)
    return demo_tenant


def _person(demo_tenant: DemoTenant, user_key: str, password: str | None) -> User:
    person, email = demo_tenant.spec.people[user_key], demo_tenant.spec.email(user_key)
    user = User.objects.filter(email=email).first() or User.objects.create_user(email, password, name=person.name)
    if password is not None and not user.check_password(password):
        user.set_password(password)
        user.save(update_fields=["password"])
    with tenant_scope(demo_tenant.tenant):
        member = Membership.objects.for_tenant(demo_tenant.tenant).filter(user=user).exists()
    if not member:
        actions.do_add_member(demo_tenant.tenant, user, person.role)
    return user


def _key(demo_tenant: DemoTenant, spec: KeySpec, secrets: Secrets, models: DemoModels) -> ApiKey:
    project = demo_tenant.projects[spec.project]
    with tenant_scope(demo_tenant.tenant):
        key = (
            ApiKey.objects.for_tenant(demo_tenant.tenant).filter(project=project, name=spec.name).order_by("pk").first()
        )
    if key is None:
        expires_at = spec.expires_in_days and datetime.now(UTC) + timedelta(days=spec.expires_in_days)
        with transaction.atomic():
            key, secret = actions.do_create_api_key(
                project,
                spec.name,
                allowed_models=models.generating[:1] if spec.first_model_only else None,
                cost_center=spec.cost_center,
                expires_at=expires_at or None,
                created_by=demo_tenant.people[spec.by],
            )
            if spec.work is not None:
                secrets.store(
                    demo_tenant, spec.name, secret
                )  # before the commit, since a key without its secret is useless
    _limit(demo_tenant, spec.limits, key=key)
    if spec.revoked:
        actions.do_revoke_api_key(key)
    return key


def _limit(
    demo_tenant: DemoTenant, limits: dict[str, int], *, key: ApiKey | None = None, set_by_operator: bool = False
) -> None:
    if not limits:
        return
    with tenant_scope(demo_tenant.tenant):
        known = LimitSet.objects.for_tenant(demo_tenant.tenant).filter(
            key=key, project=None, set_by_operator=set_by_operator
        )
        if known.exists():
            return
    actions.do_set_limits(demo_tenant.tenant, limits, key=key, set_by_operator=set_by_operator)


def _route(demo_tenant: DemoTenant, models: DemoModels) -> None:
    """Publish two versions of a routing policy, which the console can compare."""
    with tenant_scope(demo_tenant.tenant):
        known = RoutingPolicy.objects.for_tenant(demo_tenant.tenant).filter(name=NAME).count()
    first, second = models.find_model("first"), models.find_model("second")
    first_version: dict[str, Any] = {"rules": [{"targets": [{"model": first}]}]}
    both_versions: dict[str, Any] = {"rules": [{"targets": [{"model": first, "weight": 9}, {"model": second}]}]}
    for body in [first_version] if first == second else [first_version, both_versions][known:]:
        owner = demo_tenant.people["owner"]
        # The demo's prices are published later.
        actions.do_publish_policy(demo_tenant.tenant, NAME, body, created_by=owner, check_targets=False)


def create_billing(demo_tenants: list[DemoTenant], models: DemoModels, first_day: date) -> BillingEntity:
    """Create the demo's billing entity and price book, which are separate from those of real tenants.

    Args:
        first_day: the first day with usage.
    """
    with all_tenants_scope(BypassReason.COMMAND):
        entity = BillingEntity.objects.filter(slug=ENTITY).first()
    entity = entity or do_add_entity(
        slug=ENTITY,
        name="Millrace Demo Ltd",
        street="1 Example Street",
        postcode="00000",
        city="Exampleton",
        country="IE",
        vat_id="IE0000000W",
        email="billing@millrace-demo.example",
        invoice_prefix="DEMO",
        credit_note_prefix="DEMO-CN",
        payment_details="This is a demo: pay nothing.",
    )
    _tax(entity)
    for demo_tenant in demo_tenants:
        with tenant_scope(demo_tenant.tenant):
            profile = BillingProfile.objects.for_tenant(demo_tenant.tenant).first()
        if profile is None:
            spec = demo_tenant.spec
            profile = do_set_profile(
                demo_tenant.tenant,
                name=spec.name,
                street="2 Example Street",
                postcode="00000",
                city=spec.city,
                country=spec.country,
                vat_id=spec.vat_id,
                emails=[spec.email("books" if "books" in spec.people else "owner")],
            )
        if profile is None or profile.entity_id != entity.pk:
            do_assign_entity(demo_tenant.tenant, entity)
    _price(demo_tenants, models, first_day)
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


def _price(demo_tenants: list[DemoTenant], models: DemoModels, first_day: date) -> None:
    """Publish the prices. NOTE: the book is assigned before that, so that its prices apply from the first day."""
    first, second = models.find_model("first"), models.find_model("second")
    with all_tenants_scope(BypassReason.COMMAND):
        versions = list(PriceVersion.objects.filter(book__name=BOOK).order_by("pk"))
        assigned = set(PriceBookAssignment.objects.all_tenants().values_list("tenant_id", flat=True))
    old = _all_prices(models)
    if second != first:
        old = [_with_old_price(price) if price.model == second else price for price in old]
    opened = datetime(first_day.year - 1, 1, 1, tzinfo=UTC)
    draft = (
        versions[0]
        if versions
        else do_propose_prices(Proposal(tuple(old)), book=BOOK, effective_from=opened, note="Demo prices")
    )
    for demo_tenant in demo_tenants:
        if demo_tenant.tenant.pk not in assigned:
            do_assign_book(demo_tenant.tenant, BOOK)
    if draft.state == PriceVersion.State.DRAFT:
        do_publish_prices(draft, by=None)
    if second != first and len(versions) < 2:
        new = tuple(price for price in _all_prices(models) if price.model == second)
        changed = datetime.combine(first_day.replace(day=1) + timedelta(days=32), datetime.min.time(), UTC).replace(
            day=1
        )
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


def _with_old_price(price: NewPrice) -> NewPrice:
    if (price.tier, price.component) != (Tier.STANDARD, Component.OUTPUT):
        return price
    return NewPrice(price.model, price.tier, price.component, nano_per_million(_OLD_OUTPUT_PRICE))
