"""Daily spend limits of upstream credentials, as gateways reserve them in PostgreSQL. Does not import Django.

Before an upstream is called, its maximum cost is reserved from the limit of the UTC day. The settlement exchanges the
reservation for the cost. So what is booked and reserved stays within the limit, for any number of gateways. Usage above
an execution's reservation is booked all the same.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import LiteralString, NamedTuple

from psycopg_pool import AsyncConnectionPool

from billing.currencies.amounts import whole_units
from billing.rates.pricing import Component, PriceIndex, RateCard, Tier, decode_rates, prices

DATABASE_SECONDS = 0.5
SETTLING_SECONDS = 60.0  # for the end of a request that ran to its deadline to be settled
_PROMPT = (Component.UNCACHED, Component.CACHE_READ, Component.CACHE_WRITE_5M, Component.CACHE_WRITE_1H)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LIMITS: LiteralString = """
SELECT id, daily_spend_limit_nano FROM tenants_upstreamcredential
WHERE tenant_id IS NULL AND daily_spend_limit_nano IS NOT NULL
"""
_CARDS: LiteralString = "SELECT id, model, effective_from, rates FROM billing_costcard WHERE id > %s ORDER BY id"
_RESERVE: LiteralString = (
    "SELECT * FROM billing_reserve_spend(%s::bigint, %s::bigint, %s, %s, %s::smallint, %s::bigint, %s)"
)
_RELEASE: LiteralString = """
DELETE FROM billing_spendreservation WHERE admitted_at = %s AND request_id = %s AND execution = %s
"""


class SpendCheck(NamedTuple):
    """The result of a reservation from a credential's daily limit."""

    is_reserved: bool
    spent_femto: int  # booked today
    reserved_nano: int  # reservations of other executions
    resets_at: datetime  # when the next UTC day begins


class SpendStore:
    """The cost cards and the daily limits of one gateway.

    Methods may raise psycopg.Error, PoolTimeout or TimeoutError. The call may have been executed or not, and may be
    repeated.
    """

    def __init__(self, database: AsyncConnectionPool, request_seconds: float) -> None:
        """
        Args:
            database: connections in the system role.
            request_seconds: the longest time from the admission of a request to its end.
        """
        self._database = database
        self._lasting = timedelta(seconds=request_seconds + SETTLING_SECONDS)
        self._cards = PriceIndex()
        self.limits: dict[int, int] = {}  # credential ID -> nano-USD per UTC day

    async def load(self) -> None:
        """Read the limits of the platform's credentials, and the cost cards that are new."""
        async with self._database.connection(timeout=DATABASE_SECONDS) as connection:
            self.limits = dict(await (await connection.execute(_LIMITS)).fetchall())
            rows = await (await connection.execute(_CARDS, [self._cards.newest])).fetchall() if self.limits else []
        self._cards.add(
            RateCard(pk, None, model, Tier.STANDARD, (at - _EPOCH) // timedelta(microseconds=1), decode_rates(rates))
            for pk, model, at, rates in rows
        )

    def max_nano(self, model: str, prompt_tokens: int, output_tokens: int, admitted_at: int) -> int:
        """Return the maximum cost of an execution in nano-USD, rounded up; 0 if its deployment has no cost card."""
        card = self._cards.find(0, model, Tier.STANDARD, admitted_at)
        if card is None:
            return 0
        rates = prices(card, prompt_tokens, admitted_at)
        highest = max((rates[component].nano_per_million for component in _PROMPT if component in rates), default=0)
        output = rates[Component.OUTPUT].nano_per_million if Component.OUTPUT in rates else 0
        return whole_units(prompt_tokens * highest + output_tokens * output)

    async def reserve(
        self, credential_id: int, admitted_at: int, request_id: str, execution: int, nano: int
    ) -> SpendCheck:
        """Reserve an execution's maximum cost from its credential's limit of the UTC day in which it is admitted.

        Raises:
            KeyError: the credential has no limit.
        """
        limit_nano = self.limits[credential_id]
        at = _EPOCH + timedelta(microseconds=admitted_at)
        until = datetime.now(UTC) + self._lasting
        parameters = [credential_id, limit_nano, at, request_id, execution, nano, until]
        async with self._database.connection(timeout=DATABASE_SECONDS) as connection:
            row = await (await connection.execute(_RESERVE, parameters)).fetchone()
        assert row is not None  # noqa: S101  (the function returns one row)
        is_reserved, spent, reserved = row
        midnight = at.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
        return SpendCheck(is_reserved, int(spent), reserved, midnight)

    async def release(self, admitted_at: int, request_id: str, execution: int) -> None:
        """Release the reservation of an execution that was not dispatched."""
        at = _EPOCH + timedelta(microseconds=admitted_at)
        async with self._database.connection(timeout=DATABASE_SECONDS) as connection:
            await connection.execute(_RELEASE, [at, request_id, execution])
