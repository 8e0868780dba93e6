"""Actions on price books. They run one at a time, so that compiled rate cards get their ids in the order of commits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import msgspec
import structlog
from django.db import IntegrityError, connection, transaction
from django.db.models import Max

from billing.currencies.amounts import DEFAULT_CURRENCY
from billing.currencies.iso_codes import CURRENCIES
from billing.models import (
    BillingProfile,
    Budget,
    BudgetPeriod,
    Commitment,
    CompiledRateCard,
    Invoice,
    LedgerTransaction,
    MeteredUsage,
    OneOffLine,
    Price,
    PriceBook,
    PriceBookAssignment,
    PriceTerm,
    PriceVersion,
    TopUp,
    UsageEvent,
)
from billing.pricing.rate_cards import compile_rate_cards
from billing.rates.price_book import ModelTier, Proposal, parse, unpriced_hours
from billing.rates.pricing import RateCard, Tier
from inference_worker.contract.texts import Text, text_of
from tenants import audit
from tenants.actions.common import ActionRefused, Conflict, check
from tenants.actions.sole_operators import require_sole_operator
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant, User
from tenants.notifications.kinds import PRICE_DRAFT
from tenants.notifications.notifying import Notice, drop_notifications, notify

log = structlog.get_logger(__name__)
_LOCK = 0x70726963  # an arbitrary advisory lock, used only here
_BATCH = 1000
_END = """
UPDATE billing_price SET effective_until = %s
WHERE book_id = %s AND tenant_id IS NOT DISTINCT FROM %s
    AND (model, tier) IN (SELECT * FROM unnest(%s::text[], %s::text[]))
    AND effective_from < %s AND (effective_until IS NULL OR effective_until > %s)
"""


def do_propose_prices(
    proposal: Proposal,
    *,
    book: str = PriceBook.LIST,
    currency: str = "",
    tenant: Tenant | None = None,
    effective_from: datetime | None = None,
    note: str = "",
    created_by: User | None = None,
    allow_unpriced_hours: bool = False,
) -> PriceVersion:
    """Draft a price version of a book, or of one tenant's own prices, for a second user to publish.

    Args:
        currency: of a new book, and of an existing one if it is not empty. It never changes.

    Raises:
        ActionRefused: the prices are not right, or leave hours of the day without a price and that is not allowed; or
            the book has another currency.
    """
    body = _checked_body(proposal, book, tenant, allow_unpriced_hours=allow_unpriced_hours)
    with _changing():
        version = PriceVersion(
            book=_book(book, currency),
            tenant_id=None if tenant is None else tenant.pk,
            body=body,
            effective_from=effective_from,
            note=note,
            created_by=created_by,
        )
        check(version)
        version.save(force_insert=True)
        audit.record(
            "price_version.created", version, tenant_id=version.tenant_id, after=audit.serialize_for_audit(version)
        )
        _notify_waiting(version)
    return version


def do_revise_prices(
    version: PriceVersion,
    proposal: Proposal,
    *,
    by: User | None,
    book: str = PriceBook.LIST,
    tenant: Tenant | None = None,
    effective_from: datetime | None = None,
    note: str = "",
) -> PriceVersion:
    """Replace the prices of a draft. `by` becomes its author, so that a user never publishes what they wrote.

    Raises:
        Conflict: it is no draft any more.
        ActionRefused: as `do_propose_prices`.
    """
    body = _checked_body(proposal, book, tenant, allow_unpriced_hours=False)
    with _changing():
        locked = _draft(version)
        before = audit.serialize_for_audit(locked)
        locked.book, locked.tenant_id = _book(book), None if tenant is None else tenant.pk
        locked.body, locked.effective_from, locked.note, locked.created_by = body, effective_from, note, by
        check(locked)
        locked.save()
        _record("price_version.updated", locked, before)
        drop_notifications(PRICE_DRAFT, None, _link_to(locked))
        _notify_waiting(locked)
    return locked


def _checked_body(proposal: Proposal, book: str, tenant: Tenant | None, *, allow_unpriced_hours: bool) -> Any:
    """Return the prices as the JSON of a version.

    Raises:
        ActionRefused: as `do_propose_prices`.
    """
    body = msgspec.to_builtins(proposal)
    try:
        parse(body)
    except ValueError as exc:
        raise ActionRefused(Text("prices: %(error)s.", error=text_of(exc))) from exc
    gaps = unpriced_hours(proposal.prices)
    if gaps and not allow_unpriced_hours:
        if len(gaps) > 1:
            raise ActionRefused(
                Text(
                    "No price for %(gap)s, and %(more)s more. Add prices, or confirm with allow_unpriced_hours in the"
                    " API.",
                    gap=gaps[0],
                    more=len(gaps) - 1,
                )
            )
        raise ActionRefused(
            Text("No price for %(gap)s. Add prices, or confirm with allow_unpriced_hours in the API.", gap=gaps[0])
        )
    if tenant is not None and book != PriceBook.LIST:
        raise ActionRefused(Text("Tenant prices cannot be part of another price book."))
    return body


def do_publish_prices(version: PriceVersion, *, by: User | None, over_billed_usage: bool = True) -> PriceVersion:
    """Publish the draft's prices.

    Args:
        by: another user than the author. None: the operator at the machine, who may also let prices start in the past.
        over_billed_usage: publish prices that start before usage that has a price. That usage keeps its price.

    Raises:
        Conflict: it is no draft any more, its moment has passed, or a later or scheduled version is in its way.
        ActionRefused: its author wants to publish it, or it starts before billed usage and that is not confirmed.
    """
    with _changing() as now:
        locked = _draft(version)
        if by is not None and by.pk == locked.created_by_id:
            raise ActionRefused(Text("Prices must be published by someone other than their author."))
        at = locked.effective_from or now
        if at < now and by is not None:
            raise Conflict(Text("The effective date of these prices has passed. Create a new draft with a later date."))
        _require_nothing_scheduled(locked)
        if not over_billed_usage and at < now and _is_used_since(locked, at):
            raise ActionRefused(
                Text(
                    "Usage since %(at)s UTC has prices already, which do not change. Confirm with --confirm.",
                    at=f"{at:%F %R}",
                )
            )
        before = audit.serialize_for_audit(locked)
        locked.effective_from, locked.number = at, _next_number(locked.book)
        locked.state, locked.decided_at, locked.decided_by = PriceVersion.State.PUBLISHED, now, by
        locked.save()
        _set_prices(locked, at)
        _record("price_version.published", locked, before)
        drop_notifications(PRICE_DRAFT, None, _link_to(locked))
    return locked


def _notify_waiting(version: PriceVersion) -> None:
    """Notify the operators of a draft. Its author, who cannot publish it, does not see the notification."""
    author = audit.PLATFORM.name if version.created_by is None else version.created_by.email
    text = Text(
        "Draft price version %(version)s by %(author)s waits for approval", version=str(version.pk), author=author
    )
    notify(PRICE_DRAFT, None, Notice(str(version.pk), text, _link_to(version)), actor_id=version.created_by_id)


def _link_to(version: PriceVersion) -> str:
    return f"prices/{version.pk}/"


def do_publish_as_sole_operator(version: PriceVersion, *, by: User) -> PriceVersion:
    """Schedule the sole operator's own draft. It has no prices until it takes effect, an hour later or at its own time.

    The caller has checked the password of `by`, and the second factor if there is one.

    Raises:
        Conflict: it is no draft any more, its moment has passed, another version is in its way, or `by` is not the sole
            operator.
        ActionRefused: `by` is not its author.
    """
    with _changing() as now:
        locked = _draft(version)
        if by.pk != locked.created_by_id:
            raise ActionRefused(Text("You did not write this draft. Publish it as its second operator."))
        require_sole_operator(by)
        if locked.effective_from is not None and locked.effective_from < now:
            raise Conflict(Text("The effective date of these prices has passed. Create a new draft with a later date."))
        at = max(locked.effective_from or now, now + PriceVersion.SOLE_OPERATOR_DELAY)
        _require_nothing_scheduled(locked)
        with transaction.atomic():  # a later version in its way would also be there when it takes effect
            _set_prices(locked, at)
            transaction.set_rollback(True)
        before = audit.serialize_for_audit(locked)
        locked.effective_from, locked.number, locked.by_sole_operator = at, _next_number(locked.book), True
        locked.state, locked.decided_at, locked.decided_by = PriceVersion.State.SCHEDULED, now, by
        locked.save()
        _record("price_version.scheduled", locked, before)
        drop_notifications(PRICE_DRAFT, None, _link_to(locked))
    return locked


def do_cancel_prices(version: PriceVersion, *, by: User | None) -> PriceVersion:
    """Cancel a scheduled version before it takes effect. Any operator may do this.

    Raises:
        Conflict: it is not scheduled, or has taken effect.
    """
    with _changing() as now:
        locked = _lock(version)
        if locked.state != PriceVersion.State.SCHEDULED:
            raise Conflict(
                Text("Only scheduled prices can be cancelled. These prices are %(state)s.", state=locked.state)
            )
        before = audit.serialize_for_audit(locked)
        locked.state, locked.cancelled_at, locked.cancelled_by = PriceVersion.State.CANCELLED, now, by
        locked.save()
        _record("price_version.cancelled", locked, before)
    return locked


def do_start_scheduled_prices() -> list[PriceVersion]:
    """Give effect to the scheduled versions whose time has come, and return them. Their prices start now, not earlier.

    Requests that were admitted since their time have the earlier prices. A conflict of one version stops no other one.
    """
    with all_tenants_scope(BypassReason.PRICES):
        due = PriceVersion.objects.filter(state=PriceVersion.State.SCHEDULED, effective_from__lte=_read_clock())
        waiting = list(due.order_by("effective_from", "pk"))
    started = []
    for version in waiting:
        try:
            with _changing() as now:
                locked = _lock(version)
                if locked.state != PriceVersion.State.SCHEDULED:
                    continue  # cancelled or started meanwhile
                before = audit.serialize_for_audit(locked)
                locked.state, locked.effective_from = PriceVersion.State.PUBLISHED, now
                locked.save()
                _set_prices(locked, now)
                _record("price_version.published", locked, before)
            started.append(locked)
        except Conflict as exc:
            log.error("scheduled_prices_failed", version=version.pk, error=str(exc))
    return started


def _find_scheduled_model_tiers(version: PriceVersion) -> set[ModelTier]:
    """Return the models and tiers of other scheduled versions with the same owner. Call with the lock of prices."""
    rows = PriceVersion.objects.filter(
        state=PriceVersion.State.SCHEDULED, book_id=version.book_id, tenant_id=version.tenant_id
    )
    return {model_tier for row in rows.exclude(pk=version.pk) for model_tier in parse(row.body).model_tiers}


def _require_nothing_scheduled(version: PriceVersion) -> None:
    """Check that no scheduled version sets the same prices, since it would replace these when it takes effect.

    Raises:
        Conflict: one does.
    """
    both = parse(version.body).model_tiers & _find_scheduled_model_tiers(version)
    if both:
        model, tier = min(both)
        raise Conflict(
            Text(
                "Scheduled prices of %(model)s (%(tier)s) have not taken effect. Wait for them, or cancel them first.",
                model=model,
                tier=tier,
            )
        )


def _is_used_since(version: PriceVersion, at: datetime) -> bool:
    """Return whether the models of a version have priced usage from a time on."""
    models = {model for model, _ in parse(version.body).model_tiers}
    usage = UsageEvent.objects.all_tenants().filter(admitted_at__gte=at, model__in=models, price_ids__isnull=False)
    if version.tenant_id is not None:
        usage = usage.filter(tenant_id=version.tenant_id)
    return usage.exists()


def do_discard_prices(version: PriceVersion, *, by: User | None) -> PriceVersion:
    """Discard a draft.

    Raises:
        Conflict: it is no draft any more.
    """
    with _changing() as now:
        locked = _draft(version)
        before = audit.serialize_for_audit(locked)
        locked.state, locked.decided_at, locked.decided_by = PriceVersion.State.DISCARDED, now, by
        locked.save()
        _record("price_version.discarded", locked, before)
        drop_notifications(PRICE_DRAFT, None, _link_to(locked))
    return locked


def do_price_unpriced(proposal: Proposal, note: str) -> list[ModelTier]:
    """Publish list prices for models and tiers that never had any, and return these models and tiers."""
    with _changing():
        book = _book(PriceBook.LIST)
        priced = {*_model_tiers(book), *_find_scheduled_model_tiers(PriceVersion(book=book))}
        prices = tuple(price for price in proposal.prices if price.model_tier not in priced)
        if prices:
            do_publish_prices(do_propose_prices(Proposal(prices), note=note), by=None)
    return sorted({price.model_tier for price in prices})


def do_assign_book(tenant: Tenant, book: str) -> None:
    """Assign the tenant to a price book from now on. Prices of the tenant take precedence.

    Raises:
        ActionRefused: there is no such book. Conflict: it has another currency, and the tenant has amounts.
    """
    with _changing() as now:
        chosen = PriceBook.objects.filter(name=book).first()
        if chosen is None:
            raise ActionRefused(Text("Price book %(book)s does not exist.", book=repr(book)))
        assigned = PriceBookAssignment.objects.for_tenant(tenant).select_related("book").first()
        before = assigned.book if assigned else _book(PriceBook.LIST)
        if before == chosen:
            return
        if before.currency != chosen.currency:
            _require_nothing_billed(tenant, before.currency)
        row, _ = PriceBookAssignment.objects.for_tenant(tenant).update_or_create(
            tenant=tenant, defaults={"book": chosen}
        )
        model_tiers = set(_model_tiers(before)) | set(_model_tiers(chosen)) | set(_model_tiers(_book(PriceBook.LIST)))
        compile_rate_cards(chosen, tenant.pk, model_tiers, now)
        audit.record(
            "price_book.assigned", row, tenant_id=tenant.pk, before={"book": before.name}, after={"book": chosen.name}
        )


def _require_nothing_billed(tenant: Tenant, currency: str) -> None:
    """Check that a tenant has no amounts yet, so that its currency may change. Its bookings wait until the commit.

    Raises:
        Conflict: it has some.
    """
    Tenant.objects.all_tenants().select_for_update(no_key=True).get(pk=tenant.pk)
    amounts = (UsageEvent, MeteredUsage, LedgerTransaction, Invoice, Commitment, OneOffLine, PriceTerm)
    money = Budget.objects.for_tenant(tenant).filter(unit=BudgetPeriod.Unit.MONEY)
    own = Price.objects.filter(tenant_id=tenant.pk)
    if any(model.objects.for_tenant(tenant).exists() for model in amounts) or money.exists() or own.exists():
        raise Conflict(
            Text(
                "The tenant has usage, documents, payments, budgets or prices in %(currency)s. Its currency cannot"
                " be changed.",
                currency=currency,
            )
        )
    waiting = (PriceVersion.State.DRAFT, PriceVersion.State.SCHEDULED)
    drafts = PriceVersion.objects.filter(tenant_id=tenant.pk, state__in=waiting)
    pending = TopUp.objects.for_tenant(tenant).filter(state=TopUp.State.PENDING)
    automatic = BillingProfile.objects.for_tenant(tenant).filter(top_up_cents__isnull=False)
    if drafts.exists() or pending.exists() or automatic.exists():
        raise Conflict(
            Text(
                "The tenant has draft or scheduled prices, a pending top-up or automatic top-ups in %(currency)s."
                " Discard or cancel the prices, wait for the top-up or turn automatic top-ups off first.",
                currency=currency,
            )
        )


def rate_cards_to_be(version: PriceVersion) -> list[RateCard]:
    """Return the rate cards that publishing the draft would compile, from the start of its prices.

    Raises:
        Conflict: it is no draft any more, or a later version is in its way.
    """
    with _changing() as now, transaction.atomic():
        locked = _draft(version)
        at = locked.effective_from or now
        newest = CompiledRateCard.objects.aggregate(newest=Max("pk"))["newest"] or 0
        _set_prices(locked, at)
        rate_cards = [row.decode() for row in CompiledRateCard.objects.filter(pk__gt=newest, effective_from=at)]
        transaction.set_rollback(True)
    return rate_cards


@contextmanager
def _changing() -> Iterator[datetime]:
    """Open a transaction that changes prices exclusively, and yield the database's time."""
    with all_tenants_scope(BypassReason.PRICES), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        yield _read_clock()


def _read_clock() -> datetime:
    """Return the database's time."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        now: datetime = cursor.fetchone()[0]
    return now


def _book(name: str, currency: str = "") -> PriceBook:
    book = PriceBook.objects.filter(name=name).first()
    if currency and currency not in CURRENCIES:
        raise ActionRefused(Text("currency: Use a three-letter currency code of ISO 4217, for example EUR."))
    wanted = currency or (DEFAULT_CURRENCY if book is None else book.currency)
    if wanted != (DEFAULT_CURRENCY if name == PriceBook.LIST else wanted if book is None else book.currency):
        raise ActionRefused(
            Text(
                "currency: Price book %(name)s is in another currency. Choose another name for the book.",
                name=repr(name),
            )
        )
    return book or PriceBook.objects.create(name=name, currency=wanted)


def _lock(version: PriceVersion) -> PriceVersion:
    return PriceVersion.objects.select_for_update(of=("self",)).select_related("book").get(pk=version.pk)


def _record(action: str, version: PriceVersion, before: dict[str, Any]) -> None:
    audit.record(action, version, tenant_id=version.tenant_id, before=before, after=audit.serialize_for_audit(version))


def _draft(version: PriceVersion) -> PriceVersion:
    locked = _lock(version)
    if locked.state != PriceVersion.State.DRAFT:
        raise Conflict(Text("These prices are already %(state)s.", state=locked.state))
    return locked


def _next_number(book: PriceBook) -> int:
    latest: int | None = PriceVersion.objects.filter(book=book).aggregate(latest=Max("number"))["latest"]
    return (latest or 0) + 1


def _model_tiers(book: PriceBook) -> list[ModelTier]:
    rows = Price.objects.filter(book=book, tenant_id=None).values_list("model", "tier").distinct()
    return [(model, Tier(tier)) for model, tier in rows]


def _set_prices(version: PriceVersion, at: datetime) -> None:
    proposal = parse(version.body)
    model_tiers = sorted(proposal.model_tiers)
    models, tiers = [model for model, _ in model_tiers], [tier for _, tier in model_tiers]
    with connection.cursor() as cursor:
        cursor.execute(_END, [at, version.book_id, version.tenant_id, models, tiers, at, at])
    rows = [
        Price(
            version=version,
            book_id=version.book_id,
            tenant_id=version.tenant_id,
            effective_from=at,
            **msgspec.structs.asdict(price),
        )
        for price in proposal.prices
    ]
    try:
        with transaction.atomic():
            Price.objects.bulk_create(rows, batch_size=_BATCH)
    except IntegrityError as exc:
        raise Conflict(
            Text("A version with the same or a later effective date already sets some of these prices.")
        ) from exc
    compile_rate_cards(version.book, version.tenant_id, model_tiers, at)
