"""Prices that are offered for a deployment without a list price."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec

from billing.models import CompiledRateCard, PriceBook, PriceVersion
from billing.pricing import demo_prices
from billing.pricing.prices import do_propose_prices
from billing.rates.price_book import NewPrice, Proposal, ranges_of
from inference_worker.contract.texts import Text
from millrace.apps.deployments.catalog_lock import lock_deployment
from millrace.apps.deployments.deployment_checks import deployment_task
from millrace.apps.deployments.models import Deployment
from tenants.actions import Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import User

MAX_DRAFTS = 5  # returned drafts of a model


def unpriced_names(names: Iterable[str]) -> set[str]:
    """Return the deployments without a list price. Their requests are rejected. Inside `all_tenants_scope(…)`."""
    wanted = set(names)
    rows = CompiledRateCard.objects.filter(tenant_id=None, model__in=wanted, effective_from__lte=datetime.now(UTC))
    return wanted - set(rows.values_list("model", flat=True))


def has_price(name: str) -> bool:
    """Return whether the deployment has a list price."""
    with all_tenants_scope(BypassReason.OPERATOR):
        return not unpriced_names([name])


def offered_price(deployment: Deployment) -> Proposal:
    """Return prices to start from: those of a deployment with the same source, else those of the embedded models.

    Inside `all_tenants_scope(…)`.
    """
    if prices := find_similar_prices(deployment):
        return Proposal(tuple(prices))
    if deployment_task(deployment) == "generate":
        return demo_prices.proposal([deployment.name])
    return demo_prices.proposal([], [deployment.name])


def find_similar_prices(deployment: Deployment) -> list[NewPrice]:
    """Return the list prices of a deployment with the same source, for this one. Inside `all_tenants_scope(…)`."""
    similar = (
        Deployment.objects.filter(source=deployment.source, upstream_model=deployment.upstream_model)
        .exclude(pk=deployment.pk)
        .values_list("name", flat=True)
    )
    for name in similar:
        if prices := _list_prices(name):
            return [msgspec.structs.replace(price, model=deployment.name) for price in prices]
    return []


def find_drafts(model: str) -> list[PriceVersion]:
    """Return the newest drafts and scheduled versions with list prices of a model. Inside `all_tenants_scope(…)`."""
    states = (PriceVersion.State.DRAFT, PriceVersion.State.SCHEDULED)
    rows = PriceVersion.objects.filter(book__name=PriceBook.LIST, tenant_id=None, state__in=states)
    rows = rows.filter(body__contains={"prices": [{"model": model}]})
    return list(rows.defer("body").order_by("-pk")[:MAX_DRAFTS])


def do_draft_offered_price(name: str, *, by: User | None) -> PriceVersion:
    """Draft the offered price of a deployment, for another operator to publish.

    Raises:
        Conflict: it does not exist, or it has a price.
    """
    with all_tenants_scope(BypassReason.OPERATOR):
        row = lock_deployment(name)
        if not unpriced_names([name]):
            raise Conflict(
                Text("The deployment %(name)s has a price already. Change it in the price book.", name=repr(name))
            )
        return do_propose_prices(offered_price(row), note=f"Offered price of {name}", created_by=by)


def _list_prices(model: str) -> list[NewPrice]:
    rows = CompiledRateCard.objects.filter(tenant_id=None, model=model, effective_from__lte=datetime.now(UTC))
    newest = rows.order_by("tier", "-effective_from", "-pk").distinct("tier")
    return [
        NewPrice(
            model,
            row.decode().tier,
            rate.component,
            rate.nano_per_million,
            *ranges_of(rate),
        )
        for row in newest
        for rate in row.decode().rates
    ]
