"""Screens of billing entities: the list, the default one with a journal, and the forms."""

from __future__ import annotations

from datetime import date
from typing import Any

from tests.support.frontend.console import Screen, World, register


def prepare(world: World) -> None:
    from billing.invoicing.setup import do_add_tax_rule  # here: this file is read before Django is set up
    from billing.models import BillingEntity
    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope
    from tests.support.billing.charts import set_chart

    with all_tenants_scope(BypassReason.COMMAND):
        entity = BillingEntity.objects.get(slug="default")
    do_add_tax_rule(entity=entity, country="DE", region="Büsingen", category="O", starts_on=date(2020, 1, 1))
    set_chart(entity)
    world.rows["populated.entity"] = entity.pk


def _default(_tenant: Any) -> int:
    from billing.models import BillingEntity
    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope

    with all_tenants_scope(BypassReason.COMMAND):
        entity = BillingEntity.objects.filter(slug="demo").first() or BillingEntity.objects.get(slug="default")
    return int(entity.pk)


def page(name: str, url: str, queries: int = 14) -> Screen:
    return Screen(name, url, queries, who="operator", states=("populated",))


register(
    Screen("operator-entities", "/operator/entities/", queries=16, who="operator", states=("populated", "error")),
    Screen(
        "operator-entities-detail", "/operator/entities/{entity}/", 30, who="operator", states=("populated", "error")
    ),
    page("operator-entities-new", "/operator/entities/new"),
    page("operator-entities-edit", "/operator/entities/{entity}/edit"),
    page("operator-entities-tax-rule", "/operator/entities/{entity}/tax-rules/new"),
    page("operator-entities-accounts", "/operator/entities/{entity}/accounts"),
    prepare=prepare,
    demo={"entity": _default},
)
