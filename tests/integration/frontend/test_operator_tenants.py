"""The operators' tenants: the list, the actions, and the read-only view of a tenant's console."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta

import pytest
from django.test import Client

from billing.budgets.alerts import check_thresholds
from billing.budgets.budgets import do_make_budget
from billing.invoicing.setup import do_add_exchange_rate
from billing.models import (
    Budget,
    BudgetPeriod,
    Commitment,
    CreditGrant,
    OneOffLine,
    PriceBook,
    PriceBookAssignment,
    PriceTerm,
)
from billing.pricing.rate_cards import current_prices
from frontend.core import impersonation
from frontend.operator.tenants import spending
from millrace.apps.health.health_checks import find_issues
from millrace.apps.health.issues import IssueType
from tenants import actions, invitations
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import AuditEntry, Invitation, Tenant, User
from tests.support.billing import books
from tests.support.billing.euros import bill_in_euros
from tests.support.frontend.console import PASSWORD, remembered
from tests.support.rows import of, only_project, unscoped

pytestmark = pytest.mark.django_db

MACHINE_COST_MARGIN = "at the last day’s machine cost"


@pytest.fixture
def operator(client) -> User:
    user = User.objects.create_superuser("op@example.com", PASSWORD)
    client.force_login(user)
    remembered(client.session)
    return user


def rows(client, query: str = ""):
    """Return the tenants' slugs in the order of the list."""
    page = client.get(f"/operator/tenants/{query}").content.decode()
    return [part.split("<")[0] for part in page.split('<span class="mono text-muted">')[1:]]


def test_the_list_shows_usage_and_status(client, operator, use, acme):
    lab = actions.do_create_tenant("lab", "Lab", is_demo=True)
    actions.do_suspend_tenant(lab)
    use(acme, uncached=1000, output=234)
    page = client.get("/operator/tenants/").content.decode()
    assert all(word in page for word in ("Acme", "Suspended", "Demo", f'href="/operator/tenants/{acme.pk}/"'))
    assert MACHINE_COST_MARGIN not in page  # no machine cost is set


def test_the_url_has_the_lists_search_order_and_page(client, operator, acme):
    actions.do_suspend_tenant(actions.do_create_tenant("lab", "Lab"))
    do_make_budget(actions.do_create_tenant("near", "Near"), name="b", unit="money", period="month", amount=0)
    assert rows(client, "?sort=name") == ["acme", "lab", "near"]
    assert rows(client, "?sort=-name") == ["near", "lab", "acme"]
    assert rows(client, "?q=LA") == ["lab"]
    assert rows(client, "?show=suspended") == ["lab"]
    assert rows(client, "?show=near") == ["near"]
    assert rows(client, "?show=active&page=9&sort=x") == ["acme", "near"]


def test_a_budget_shows_how_full_it_is(client, operator, acme):
    budget = do_make_budget(acme, name="All", unit="money", period="lifetime", amount=10**10)
    trial = do_make_budget(acme, name="Trial", unit="money", period="lifetime", amount=1, mode="dry_run")
    begun = datetime(1970, 1, 1, tzinfo=UTC)
    with all_tenants_scope(BypassReason.BILLING):
        for row, held in ((budget, 2 * 10**9), (trial, 0)):
            BudgetPeriod.objects.create(
                tenant_id=acme.pk, budget_id=row.pk, unit="money", period_start=begun, used=7 * 10**15, reserved=held
            )
    assert "90.0%" in client.get("/operator/tenants/").content.decode()
    assert rows(client, "?show=near") == ["acme"]
    page = client.get(f"/operator/tenants/{acme.pk}/").content.decode()
    assert "$9.00" in page
    assert "Dry run" in page


def spender(slug: str, *budgets: tuple[str, int]) -> Tenant:
    """A tenant with budgets, each of a mode and with its used percent."""
    tenant = actions.do_create_tenant(slug, slug)
    for mode, percent in budgets:
        budget = do_make_budget(tenant, name=mode, unit="tokens", period="lifetime", amount=1000, mode=mode)
        with all_tenants_scope(BypassReason.BILLING):
            BudgetPeriod.objects.create(
                tenant_id=tenant.pk,
                budget_id=budget.pk,
                unit="tokens",
                period_start=datetime(1970, 1, 1, tzinfo=UTC),
                used=percent * 10**7 - 10**6,
                reserved=1,
            )
    return tenant


def test_health_and_tenants_agree_on_who_is_near_and_at_a_limit(client, operator):
    """At a limit is an active tenant whose requests a hard budget rejects."""
    spender("hard-99", ("hard", 99))
    spender("hard-98", ("hard", 98))
    spender("soft-150", ("soft", 150))
    spender("both", ("soft", 150), ("hard", 99))
    spender("room", ("hard", 79), ("dry_run", 200))
    actions.do_suspend_tenant(spender("paused", ("hard", 100)))
    unused = actions.do_create_tenant("zero", "zero")
    do_make_budget(unused, name="hard", unit="tokens", period="lifetime", amount=0)
    near, full = {"hard-99", "hard-98", "soft-150", "both", "zero"}, {"hard-99", "both", "zero"}
    assert set(rows(client, "?show=near")) == near
    page = client.get("/operator/tenants/").content.decode()
    counts = dict(re.findall(r"<dt>(Near a limit|At a limit)</dt><dd><span[^>]*>(\d+)</span>", page))
    assert counts == {"Near a limit": str(len(near)), "At a limit": str(len(full))}
    with all_tenants_scope(BypassReason.OPERATOR):
        found = {issue for issue in find_issues(None) if issue.issue_type == IssueType.BUDGET and issue.tenant}
    assert {issue.tenant.slug for issue in found} == near
    assert {issue.tenant.slug for issue in found if issue.urgent} == full
    assert {issue.title for issue in found if issue.tenant.slug in ("both", "zero")} == {
        "both: budget “hard” is 99% used, and 1 more",
        "zero: budget “hard” has no budget left",
    }


@pytest.mark.parametrize(
    ("dollars_an_hour", "text"), [(1, "cost exceeds the price"), (0, "100.0%")], ids=["loss", "profit"]
)
def test_a_margin_is_in_percent_of_the_price(client, operator, use, acme, monkeypatch, dollars_an_hour, text):
    use(acme, uncached=1000, output=234, price_version=books.rate_card())
    monkeypatch.setattr(spending, "token_costs", lambda now: {"smollm2-135m": dollars_an_hour * 10**18})
    for address in ("/operator/tenants/", f"/operator/tenants/{acme.pk}/"):
        page = client.get(address).content.decode()
        assert MACHINE_COST_MARGIN in page
        assert text in page
        assert ("−" in page) == bool(dollars_an_hour)


def test_amounts_are_in_the_currency_of_each_tenant(client, operator, use, acme, monkeypatch):
    bill_in_euros(acme)
    version = books.rate_card()
    for tenant in (acme, actions.do_create_tenant("lab", "Lab")):
        use(tenant, uncached=10**6, price_version=version)  # costs 3
    budget = do_make_budget(acme, name="All", unit="money", period="lifetime", amount=10**10)
    with all_tenants_scope(BypassReason.BILLING):
        fields = {"unit": "money", "period_start": datetime(1970, 1, 1, tzinfo=UTC), "used": 6 * 10**15}
        BudgetPeriod.objects.create(tenant_id=acme.pk, budget_id=budget.pk, **fields)
    listed, detail = "/operator/tenants/", f"/operator/tenants/{acme.pk}/"
    page = client.get(listed).content.decode()
    assert (page.count(">$3<"), page.count(">€3<")) == (2, 2)  # of a tenant, and of all tenants in the currency
    assert "of €10.00 in total" in page
    page = client.get(detail).content.decode()
    assert (">€3<" in page, ">$" in page, "€6.00" in page) == (True, False, True)
    assert "Raise by, in EUR" in client.get(f"{detail}budgets/{budget.pk}/raise").content.decode()
    check_thresholds()
    page = client.get("/operator/alerts/?show=budgets").content.decode()
    assert "€6.00" in page and "€10.00" in page
    monkeypatch.setattr(spending, "token_costs", lambda now: {"smollm2-135m": 10**15})
    assert [client.get(address).content.decode().count(">$2<") for address in (listed, detail)] == [2, 0]
    do_add_exchange_rate(currency="EUR", on=date(2020, 1, 1), micro_per_usd=500_000)
    pages = [client.get(address).content.decode() for address in (listed, detail)]
    assert [page.count(">$5<") for page in pages] == [1, 1]  # 3 euros are 6 dollars
    assert pages[0].count(">$7<") == 1


def test_no_tenant_yet(client, operator):
    assert "No tenants yet" in client.get("/operator/tenants/").content.decode()


def test_queries_do_not_grow_with_tenants(client, operator, use, django_assert_max_num_queries):
    for number in range(6):
        use(actions.do_create_tenant(f"t{number}", "T"))
    with django_assert_max_num_queries(24):
        client.get("/operator/tenants/")


def test_a_tenant_is_created_with_its_owner_invited(client, operator):
    sent = {"name": "Blue Whale Ltd", "slug": "", "email": "Boss@Example.com"}
    made = client.post("/operator/tenants/new", sent)
    with all_tenants_scope(BypassReason.COMMAND):
        tenant = Tenant.objects.all_tenants().get(slug="blue-whale-ltd")
    (invited,) = of(Invitation, tenant)
    assert (invited.email, invited.role) == ("boss@example.com", "owner")
    assert (made.status_code, made.url) == (303, f"/operator/tenants/{tenant.pk}/invitations/{invited.pk}")
    page = client.get(made.url).content.decode()
    for text in (f'href="/operator/tenants/{tenant.pk}/"', invitations.link(invited), "No mail server is configured"):
        assert text in page, text
    again = client.post("/operator/tenants/new", sent)
    assert (again.status_code, "A tenant with the slug" in again.content.decode()) == (422, True)
    assert client.post("/operator/tenants/new", sent | {"slug": "Not one"}).status_code == 422


def test_an_invitation_link_is_shown_once_and_its_form_works_once(client, operator, acme):
    url = f"/operator/tenants/{acme.pk}/invite"
    (token,) = re.findall(r'name="form_token" value="([^"]+)"', client.get(url).content.decode())
    sent = {"email": "second@example.com", "form_token": token}
    answers = [client.post(url, sent) for _ in range(2)]  # the second one is a double click, or a reloaded page
    (invited,) = of(Invitation, acme, email="second@example.com")
    shown = f"/operator/tenants/{acme.pk}/invitations/{invited.pk}"
    assert {(answer.status_code, answer.url) for answer in answers} == {(303, shown)}
    other = Client()
    other.force_login(User.objects.create_superuser("other@example.com", PASSWORD))
    assert other.get(shown).url == f"/operator/tenants/{acme.pk}/"
    assert invitations.link(invited) in client.get(shown).content.decode()
    again = client.get(shown)
    assert (again.status_code, again.url) == (303, f"/operator/tenants/{acme.pk}/")
    page = client.get(again.url).content.decode()
    assert "was shown once" in page and invitations.link(invited) not in page
    assert client.get(f"/operator/tenants/{acme.pk}/invitations/{invited.pk + 1}").status_code == 404


def test_suspending_requires_the_slug(client, operator, acme):
    url = f"/operator/tenants/{acme.pk}/suspend"
    assert client.post(url).status_code == 303
    assert "Resume" in client.get(f"/operator/tenants/{acme.pk}/").content.decode()
    assert client.post(f"/operator/tenants/{acme.pk}/resume").status_code == 303
    verbs = [row.action for row in sorted(of(AuditEntry, acme, actor="op@example.com"), key=lambda row: row.pk)]
    assert verbs == ["tenant.suspended", "tenant.resumed"]


def test_changes_of_money_require_reauthentication(client, acme):
    client.force_login(User.objects.create_superuser("op@example.com", PASSWORD))
    for name in ("suspend", "resume", "book", "invite"):
        fields = {"book": PriceBook.LIST, "email": "new@example.com"}
        assert client.post(f"/operator/tenants/{acme.pk}/{name}", fields).url.startswith("/account/confirm?"), name


def test_credit_is_granted(client, operator, acme):
    """The tenant's page links to the form of billing."""
    page = client.get(f"/operator/tenants/{acme.pk}/").content.decode()
    assert page.count('href="/operator/billing/tenants/acme/credit"') == 1
    given = {"kind": "promotional", "amount": "12.50", "expires_on": "2031-01-31", "note": "Sorry", "seen": "0"}
    response = client.post("/operator/billing/tenants/acme/credit", given | {"typed": "acme", "currency": "USD"})
    assert (response.status_code, response.url) == (303, f"/operator/tenants/{acme.pk}/")
    (grant,) = of(CreditGrant, acme)
    assert (grant.nano, grant.note) == (12_500_000_000, "Sorry")
    assert grant.expires_at == datetime(2031, 2, 1, tzinfo=UTC)
    page = client.get(response.url).content.decode()
    assert "$12" in page and "$12.50 credit added for Acme." in page


def test_a_budget_is_raised_for_a_while(client, operator, acme):
    budget = do_make_budget(acme, name="All", unit="tokens", period="month", amount=1000)
    url = f"/operator/tenants/{acme.pk}/budgets/{budget.pk}/raise"
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).date()
    assert client.post(url, {"more": "500", "until": tomorrow - timedelta(days=2)}).status_code == 422
    assert client.post(url, {"more": "500", "until": tomorrow}).status_code == 303
    (row,) = of(Budget, acme)
    assert (row.temporary_increase, row.increase_expires_at.date()) == (500, tomorrow + timedelta(days=1))
    other = actions.do_create_tenant("lab", "Lab")
    assert client.post(f"/operator/tenants/{other.pk}/budgets/{budget.pk}/raise", {"more": 1}).status_code == 404


def test_commitments_are_added_and_ended(client, operator, acme):
    detail = f"/operator/tenants/{acme.pk}/"
    new = f"{detail}commitments/new"
    agreed = {"name": "Base", "fee": "42", "included": "50", "first_month": "2199-01", "starts_on": "2199-01-11"}
    assert f'href="{new}"' in client.get(detail).content.decode()
    for wrong, text in (
        ({"starts_on": "2199-02-01"}, "Choose a day of the first month, 2199-01."),
        ({"last_month": "2198-12"}, "Choose the first month or a later one."),
        ({"included": "0"}, "greater than or equal to 0.01"),
        ({"first_month": "2199-13"}, "Enter a month, such as 2026-12."),
    ):
        refused = client.post(new, agreed | wrong)
        assert (refused.status_code, text in refused.content.decode()) == (422, True), wrong
    assert client.post(new, agreed).status_code == 303
    (row,) = of(Commitment, acme)
    assert (row.fee, row.included_nano, row.starts_on, row.last_month) == (4200, 50 * 10**9, date(2199, 1, 11), "")
    url = f"{detail}commitments/{row.pk}/end"
    shown = client.get(detail).content.decode()
    assert all(text in shown for text in (f'href="{url}"', "$42.00", "$50.00", "11 Jan 2199", "without an end"))
    refused = client.post(url, {"last_month": "2198-12"})
    assert (refused.status_code, "Choose the first month or a later one." in refused.content.decode()) == (422, True)
    assert client.post(url, {"last_month": "2199"}).status_code == 422
    assert client.post(url, {"last_month": "2199-02"}).status_code == 303
    assert [row.last_month for row in of(Commitment, acme)] == ["2199-02"]
    assert "until 2199-02" in client.get(detail).content.decode()
    other = actions.do_create_tenant("lab", "Lab")
    elsewhere = f"/operator/tenants/{other.pk}/commitments/{row.pk}/end"
    assert client.post(elsewhere, {"last_month": "2199-01"}).status_code == 404


def test_a_commitment_has_the_decimals_of_the_tenants_currency(client, operator, acme):
    with all_tenants_scope(BypassReason.PRICES):
        book = PriceBook.objects.create(name="yen", currency="JPY")
        PriceBookAssignment.objects.all_tenants().create(tenant=acme, book=book)
    agreed = {"name": "Base", "fee": "0", "included": "5000", "first_month": "2199-01"}
    url = f"/operator/tenants/{acme.pk}/commitments/new"
    assert client.post(url, agreed | {"fee": "0.5"}).status_code == 422
    assert client.post(url, agreed).status_code == 303
    assert [(row.fee, row.included_nano) for row in of(Commitment, acme)] == [(0, 5000 * 10**9)]


PRICE_TERMS = {
    "minimum": (
        {"amount": "50", "starts_on": "2199-01-11"},
        {"term_type": "minimum", "cents": 5000},
        "At least $50.00 per month",
    ),
    "discount": (
        {"percent": "12.5", "model": "m"},
        {"term_type": "discount", "model": "m", "ppm": 125_000},
        "12.5% less for m",
    ),
    "tiered-price": (
        {
            **{"term_type": "graduated", "model": "m", "tier": "batch", "component": "output"},
            "tiers": "0 0\n\n2000000  9.25",
        },
        {
            **{"term_type": "graduated", "model": "m", "tier": "batch", "component": "output"},
            "tiers": [
                {"from_tokens": 0, "nano_per_million": 0},
                {"from_tokens": 2_000_000, "nano_per_million": 9_250_000_000},
            ],
        },
        "from 2,000,000 tokens: $9.25 per 1M",
    ),
}


@pytest.mark.parametrize("name", PRICE_TERMS)
def test_price_terms_are_added_and_ended(client, operator, acme, name):
    fields, rule, text = PRICE_TERMS[name]
    detail = f"/operator/tenants/{acme.pk}/"
    data = {"description": "Agreed", "first_month": "2199-01"} | fields
    refused = client.post(f"{detail}price-terms/{name}", data | {"last_month": "2198-12"})
    assert (refused.status_code, "Choose the first month or a later one." in refused.content.decode()) == (422, True)
    assert client.post(f"{detail}price-terms/{name}", data).status_code == 303
    (row,) = of(PriceTerm, acme)
    assert (row.rule, row.first_month, row.last_month) == (rule, "2199-01", "")
    assert row.starts_on == (date(2199, 1, 11) if name == "minimum" else None)
    end = f"{detail}price-terms/{row.pk}/end"
    shown = client.get(detail).content.decode()
    assert f'href="{end}"' in shown
    assert text in shown
    assert client.post(end, {"last_month": "2199-02"}).status_code == 303
    assert [row.last_month for row in of(PriceTerm, acme)] == ["2199-02"]
    assert client.post(end, {"last_month": "2199-03"}).status_code == 422
    other = actions.do_create_tenant("lab", "Lab")
    assert client.post(f"/operator/tenants/{other.pk}/price-terms/{row.pk}/end", {}).status_code == 404


@pytest.mark.parametrize(
    ("tiers", "text"),
    [
        ("1 2.50", "start the first of up to 100 tiers at 0 tokens"),
        ("0 2.50\n1000", "Line 2: enter a number of tokens and a price, separated by a space."),
        ("0 free", "Line 1: &#x27;free&#x27; is not a number."),
        (f"0 1\n{'9' * 19} 1", "Line 2: enter a number of tokens"),
    ],
)
def test_invalid_tiers_are_refused_with_their_line(client, operator, acme, tiers, text):
    fields = {"description": "Agreed", "first_month": "2199-01", "term_type": "volume", "model": "m"}
    fields |= {"tier": "standard", "component": "output", "tiers": tiers}
    refused = client.post(f"/operator/tenants/{acme.pk}/price-terms/tiered-price", fields)
    assert (refused.status_code, text in refused.content.decode()) == (422, True)
    assert not of(PriceTerm, acme)


def test_one_off_lines_are_added_ended_and_removed(client, operator, acme):
    detail = f"/operator/tenants/{acme.pk}/"
    line = {"description": "Support", "amount": "12.50", "month": "2999-01"}
    refused = client.post(f"{detail}one-off-lines/new", line | {"last_month": "2998-12"})
    assert (refused.status_code, "Choose the first month or a later one." in refused.content.decode()) == (422, True)
    assert client.post(f"{detail}one-off-lines/new", line | {"amount": "0"}).status_code == 422
    assert client.post(f"{detail}one-off-lines/new", line | {"last_month": "2999-06"}).status_code == 303
    assert client.post(f"{detail}one-off-lines/new", line | {"description": "Setup"}).status_code == 303
    support, setup = sorted(of(OneOffLine, acme), key=lambda row: row.pk)
    assert [(row.cents, row.last_month) for row in (support, setup)] == [(1250, "2999-06"), (1250, "")]
    shown = client.get(detail).content.decode()
    ends, removes = f"{detail}one-off-lines/{support.pk}/end", f"{detail}one-off-lines/{setup.pk}/remove"
    assert all(text in shown for text in ("each month from 2999-01 to 2999-06", f'href="{ends}"', f'href="{removes}"'))
    assert client.post(ends, {"last_month": "2999-07"}).status_code == 422
    assert client.post(ends, {"last_month": "2999-02"}).status_code == 303
    assert client.post(removes, {"sure": "yes"}).status_code == 303
    assert [row.last_month for row in of(OneOffLine, acme)] == ["2999-02"]
    other = actions.do_create_tenant("lab", "Lab")
    elsewhere = f"/operator/tenants/{other.pk}/one-off-lines/{support.pk}/end"
    assert client.post(elsewhere, {"last_month": "2999-01"}).status_code == 404


def test_another_price_book_is_assigned(client, operator, acme):

    books.rate_card()
    with all_tenants_scope(BypassReason.PRICES):
        PriceBook.objects.create(name="partners")
        before = current_prices(acme.pk, datetime.now(UTC))
    assert client.post(f"/operator/tenants/{acme.pk}/book", {"book": "none-such"}).status_code == 422
    assert client.post(f"/operator/tenants/{acme.pk}/book", {"book": "partners"}).status_code == 303
    with all_tenants_scope(BypassReason.PRICES):
        assert before
        assert current_prices(acme.pk, datetime.now(UTC)) == []


def view(client, tenant: Tenant, why: str = "ticket 12"):
    return client.post(f"/operator/tenants/{tenant.pk}/view", {"reason": why})


def test_an_operator_must_give_a_reason_to_view_a_tenant(client, operator, acme):
    response = client.get("/t/acme/requests/?key=1")
    assert response.url == f"/operator/tenants/{acme.pk}/view?next=%2Ft%2Facme%2Frequests%2F%3Fkey%3D1"
    assert client.get("/t/unknown/").status_code == 404
    assert client.post(response.url, {"reason": " "}).status_code == 422
    assert client.post(response.url, {"reason": "ticket 12"}).url == "/t/acme/requests/?key=1"
    assert client.get("/t/acme/requests/").status_code == 200
    assert client.post(f"/operator/tenants/{acme.pk}/view?next=//evil.example/", {"reason": "x"}).url == "/t/acme/"


def test_a_view_is_read_only(client, operator, acme):
    key, _ = actions.do_create_api_key(only_project(acme), "prod")
    view(client, acme)
    before = len(unscoped(AuditEntry).all())
    page = client.get("/t/acme/keys/").content.decode()
    assert "prod" in page
    assert "You are viewing Acme as an operator" in page
    assert "Create key" not in page
    for address in ("keys/new", f"keys/{key.pk}/revoke", "members/invite", "members/leave", "settings/name"):
        assert client.post(f"/t/acme/{address}", {"name": "x", "typed": "prod"}).status_code in (403, 404), address
    assert client.post("/t/acme/keys/new", {"name": "x"}).status_code == 403
    assert len(unscoped(AuditEntry).all()) == before


def test_the_banner_is_on_every_page_until_the_view_ends(client, operator, acme):
    view(client, acme)
    assert "End view" in client.get("/operator/tenants/").content.decode()
    assert client.post("/operator/tenants/view/end").url == f"/operator/tenants/{acme.pk}/"
    assert "End view" not in client.get("/operator/tenants/").content.decode()
    assert client.get("/t/acme/").status_code == 302
    started, ended = sorted(of(AuditEntry, acme, actor="op@example.com"), key=lambda row: row.pk)
    assert (started.action, started.after["why"], ended.action) == (
        "tenant.view_started",
        "ticket 12",
        "tenant.view_ended",
    )


def test_a_view_is_limited_to_one_tenant_and_expires(client, operator, acme, monkeypatch):
    other = actions.do_create_tenant("lab", "Lab")
    view(client, acme)
    assert client.get("/t/lab/").status_code == 302
    view(client, other)
    assert client.get("/t/acme/").status_code == 302
    assert [row.action for row in of(AuditEntry, acme, action="tenant.view_ended")] == ["tenant.view_ended"]
    session = client.session
    session["viewing"] = session["viewing"] | {"until": datetime.now(UTC).timestamp() - 1}
    session.save()
    assert client.get("/t/lab/").status_code == 302


def test_logging_out_ends_the_view(client, operator, acme):
    view(client, acme)
    client.post("/logout")
    assert len(of(AuditEntry, acme, action="tenant.view_ended")) == 1


def test_members_cannot_view(client, acme):
    owner = User.objects.create_user("owner@example.com", PASSWORD)
    actions.do_add_member(acme, owner, "owner")
    client.force_login(owner)
    assert client.get(f"/operator/tenants/{acme.pk}/view").status_code == 404
    assert client.post("/operator/tenants/view/end").status_code == 404
    assert client.get(f"/operator/tenants/{acme.pk}/").status_code == 404
    session = client.session
    session["viewing"] = {"tenant_id": acme.pk, "slug": "acme", "name": "Acme", "until": 4e9}
    session.save()
    assert client.get("/t/acme/keys/new").status_code == 200  # a member is not a viewer, whatever the session contains


def test_a_view_lasts_an_hour(rf, acme):
    request = rf.get("/")
    request.session = {}
    impersonation.start(request, acme, "ticket 12")
    found = impersonation.impersonation_of(request)
    assert found is not None
    assert timedelta(minutes=59) < found.until - datetime.now(UTC) <= timedelta(hours=1)
