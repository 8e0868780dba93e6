"""The operator's costs: cost cards, the cost of each execution, daily sums, and reserved spend of credentials.

Tenants' database role cannot read these rows.
"""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import F, Q

from billing.models.token_columns import ExecutionTokens
from billing.rates.pricing import RateCard, Tier, decode_rates


class CostCard(models.Model):
    """The prices that the operator pays for a deployment's tokens, from a time on. Only ever added to.

    The card that is effective when an execution is admitted applies to it. A card without rates ends the one before.
    """

    AUDITED: ClassVar = ("model", "effective_from", "note")

    model = models.CharField(max_length=128, help_text="the deployment's name")
    effective_from = models.DateTimeField()
    rates = models.BinaryField()
    note = models.CharField(max_length=200, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering: ClassVar = ["model", "-effective_from", "-id"]
        indexes: ClassVar = [models.Index(fields=["model", "-effective_from"], name="cost_card_model")]

    def __str__(self) -> str:
        return f"{self.model} ({self.pk})"

    def decode(self) -> RateCard:
        effective_from = round(self.effective_from.timestamp() * 1e6)
        return RateCard(self.pk, None, self.model, Tier.STANDARD, effective_from, decode_rates(self.rates))


class ExecutionCost(ExecutionTokens):
    """The operator's cost of one execution, booked once, whatever the tenant pays for it.

    The tokens are those that were reported; the usage event has those that the tenant is charged for.
    """

    pk = models.CompositePrimaryKey("admitted_at", "request_id", "execution")
    admitted_at = models.DateTimeField()
    request_id = models.CharField(max_length=64)
    execution = models.SmallIntegerField()
    tenant_id = models.BigIntegerField()
    model = models.CharField(max_length=128)
    credential_id = models.BigIntegerField(null=True, help_text="the upstream credential that it used")
    is_tenant_credential = models.BooleanField(help_text="the tenant pays the provider, so the cost is 0")
    usage_source = models.CharField(max_length=9)
    outcome = models.CharField(max_length=16, help_text="as reported with the tokens")
    cost_card_id = models.BigIntegerField(null=True, help_text="None: the deployment had none")
    cost_femto = models.DecimalField(max_digits=38, decimal_places=0)
    uncosted_tokens = models.IntegerField(help_text="of classes without a price in the cost card")
    unbilled_femto = models.DecimalField(
        max_digits=38,
        decimal_places=0,
        help_text="the price of the tokens above the reservation, which are not charged",
    )
    booked_at = models.DateTimeField()

    class Meta:
        indexes: ClassVar = [
            models.Index(F("model"), F("admitted_at").desc(), name="execution_cost_model"),
            models.Index(F("tenant_id"), F("admitted_at").desc(), name="execution_cost_tenant"),
            models.Index(F("admitted_at").desc(), condition=Q(unbilled_femto__gt=0), name="execution_cost_unbilled"),
            models.Index(fields=["request_id"], name="execution_cost_request"),
        ]
        constraints: ClassVar = [
            models.CheckConstraint(
                name="execution_cost_amounts",
                condition=Q(cost_femto__gte=0, unbilled_femto__gte=0, uncosted_tokens__gte=0),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.request_id}/{self.execution}"


class DailyCost(models.Model):
    """The sum of the execution costs of a UTC day, by tenant, deployment and credential."""

    day = models.DateField()
    tenant_id = models.BigIntegerField()
    model = models.CharField(max_length=128)
    credential_id = models.BigIntegerField(help_text="0: none")
    executions = models.BigIntegerField()
    estimated = models.BigIntegerField(help_text="executions whose tokens are estimated")
    cost_femto = models.DecimalField(max_digits=38, decimal_places=0)
    failed_femto = models.DecimalField(max_digits=38, decimal_places=0, help_text="part of the cost: failed executions")
    uncosted_tokens = models.BigIntegerField()
    unbilled_femto = models.DecimalField(max_digits=38, decimal_places=0)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["day", "tenant_id", "model", "credential_id"], name="daily_cost_once"),
        ]
        indexes: ClassVar = [models.Index(fields=["credential_id", "day"], name="daily_cost_credential")]

    def __str__(self) -> str:
        return f"{self.day} {self.model}"


class SpendReservation(models.Model):
    """The maximum cost of an execution, reserved from its credential's daily limit until its cost is booked.

    A reservation whose usage never arrives expires.
    """

    pk = models.CompositePrimaryKey("admitted_at", "request_id", "execution")
    admitted_at = models.DateTimeField()
    request_id = models.CharField(max_length=64)
    execution = models.SmallIntegerField()
    credential_id = models.BigIntegerField()
    nano = models.BigIntegerField()
    expires_at = models.DateTimeField()

    class Meta:
        indexes: ClassVar = [models.Index(fields=["credential_id", "expires_at"], name="spend_reservation_open")]
        constraints: ClassVar = [models.CheckConstraint(name="spend_reservation_amount", condition=Q(nano__gte=0))]

    def __str__(self) -> str:
        return f"{self.request_id}/{self.execution}"
