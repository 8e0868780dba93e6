"""Screens of the operators' tenants: the list, a tenant with one object of each type, and the forms."""

from __future__ import annotations

from datetime import UTC, datetime

from tests.support.frontend.console import Screen, World, register


def prepare(world: World) -> None:
    from billing.budgets.budgets import do_make_budget  # here: this file is read before Django is set up
    from billing.invoicing.one_off_lines import do_add_one_off_line
    from billing.ledger.credits import do_commit, do_grant_credit
    from billing.models import CreditGrant
    from tenants import actions

    tenant = world.tenants["populated"]
    budget = do_make_budget(tenant, name="All of it", unit="money", period="month", amount=10**12)
    do_grant_credit(tenant, CreditGrant.GrantType.PROMOTIONAL, 25 * 10**9, note="Welcome")
    actions.do_set_limits(tenant, {"requests_per_minute": 600}, set_by_operator=True)
    actions.do_invite(tenant, "new@example.com", "developer")
    actions.do_suspend_tenant(actions.do_create_tenant("paused", "Paused Works"))
    world.rows["populated.tenant"] = tenant.pk
    world.rows["empty.tenant"] = world.tenants["empty"].pk
    world.rows["over.tenant"] = world.tenants["over"].pk
    world.rows["populated.tenant_budget"] = budget.pk
    agreed = do_commit(tenant, "Base", fee=1, included_nano=1, first_month="2999-01")  # it changes no other screen
    world.rows["populated.tenant_commitment"] = agreed.pk
    world.rows["populated.price_term"] = add_price_terms(tenant)
    line = do_add_one_off_line(tenant, month="2999-01", description="Support", cents=100, months=2)
    world.rows["populated.one_off_line"] = line.pk
    actions.do_start_viewing(tenant, datetime.now(UTC), "ticket 12")


def _a_budget(tenant):
    from billing.models import Budget

    return Budget.objects.for_tenant(tenant).first().pk


def _a_commitment(tenant):
    from billing.ledger.credits import do_commit
    from billing.models import Commitment

    row = Commitment.objects.for_tenant(tenant).first()
    return (row or do_commit(tenant, "Base", fee=100_000, included_nano=10**12, first_month="2999-01")).pk


def _a_price_term(tenant):
    from billing.models import PriceTerm

    row = PriceTerm.objects.for_tenant(tenant).order_by("pk").first()
    return row.pk if row is not None else add_price_terms(tenant)


def add_price_terms(tenant) -> int:
    """Add a price term of each form to a tenant. Return the ID of the first one."""
    from billing.invoicing.price_terms import do_add_price_term
    from billing.rates.pricing import Component
    from billing.rates.terms import TermRule, TermType, VolumeTier

    discount, minimum = TermRule(TermType.DISCOUNT, ppm=125_000), TermRule(TermType.MINIMUM, cents=50_000)
    tiers = (VolumeTier(0, 3_000_000_000), VolumeTier(10**9, 2_500_000_000))
    graduated = TermRule(TermType.GRADUATED, model="smollm2-135m", component=Component.OUTPUT, tiers=tiers)
    named = {"Partner discount": discount, "Minimum": minimum, "Output tiers": graduated}
    rows = [do_add_price_term(tenant, rule, description=name, first_month="2999-01") for name, rule in named.items()]
    return rows[0].pk


def _a_line(tenant):
    from billing.invoicing.one_off_lines import do_add_one_off_line
    from billing.models import OneOffLine

    row = OneOffLine.objects.for_tenant(tenant).exclude(last_month="").first()
    fields = {"month": "2999-01", "description": "Premium support", "cents": 50_000, "months": 12}
    return (row or do_add_one_off_line(tenant, **fields)).pk


def form(name: str) -> Screen:
    return Screen(
        f"operator-tenants-{name}", f"/operator/tenants/{{tenant}}/{name}", 20, who="operator", states=("populated",)
    )


register(
    Screen("operator-tenants", "/operator/tenants/", queries=24, who="operator", states=("populated", "error")),
    Screen(
        "operator-tenants-near", "/operator/tenants/?show=near&sort=name", 24, who="operator", states=("populated",)
    ),
    Screen("operator-tenants-new", "/operator/tenants/new", queries=10, who="operator", states=("populated",)),
    Screen("operator-tenants-detail", "/operator/tenants/{tenant}/", queries=79, who="operator"),
    *(form(name) for name in ("suspend", "resume", "book", "invite", "view")),
    Screen(
        "operator-tenants-raise",
        "/operator/tenants/{tenant}/budgets/{tenant_budget}/raise",
        queries=10,
        who="operator",
        states=("populated",),
    ),
    *(
        Screen(
            f"operator-tenants-{name}",
            f"/operator/tenants/{{tenant}}/{path}",
            queries,
            who="operator",
            states=("populated",),
        )
        for name, path, queries in (
            ("add-commitment", "commitments/new", 12),
            ("end-commitment", "commitments/{tenant_commitment}/end", 9),
            ("add-minimum", "price-terms/minimum", 12),
            ("add-discount", "price-terms/discount", 12),
            ("add-tiered-price", "price-terms/tiered-price", 12),
            ("end-price-term", "price-terms/{price_term}/end", 9),
        )
    ),
    *(
        Screen(
            f"operator-tenants-{name}-line",
            f"/operator/tenants/{{tenant}}/one-off-lines/{place}",
            queries=12,
            who="operator",
            states=("populated",),
        )
        for name, place in (("add", "new"), ("end", "{one_off_line}/end"), ("remove", "{one_off_line}/remove"))
    ),
    prepare=prepare,
    demo={
        "tenant": lambda tenant: tenant.pk,
        "tenant_budget": _a_budget,
        "tenant_commitment": _a_commitment,
        "price_term": _a_price_term,
        "one_off_line": _a_line,
    },
)
