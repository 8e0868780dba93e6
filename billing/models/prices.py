"""Price books, their published versions and prices, and the compiled rate cards that admissions pin."""

from __future__ import annotations

from datetime import timedelta
from typing import ClassVar

from django.db import models
from django.db.models import F, Q

from billing.currencies.amounts import MAX_NANO_PER_MILLION
from billing.rates.pricing import (
    DAYS_A_WEEK,
    MINUTES_A_DAY,
    NO_END,
    UTC_ZONE,
    Component,
    RateCard,
    Tier,
    decode_rates,
)
from tenants.isolation.scopes import TenantManager
from tenants.models import Tenant, User

SOLE_OPERATOR_DELAY = timedelta(hours=1)  # time before prices of the sole operator take effect


class PriceBook(models.Model):
    """A list of prices. Tenants use the book `list` unless another one is assigned to them."""

    LIST: ClassVar = "list"

    name = models.SlugField(max_length=50, unique=True)
    currency = models.CharField(
        max_length=3, default="USD", db_default="USD", help_text="of its prices, and of the bills of its tenants"
    )

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(name="price_book_list_in_usd", condition=~Q(name="list") | Q(currency="USD"))
        ]

    def __str__(self) -> str:
        return self.name


class PriceBookAssignment(models.Model):
    """The assignment of a tenant to a price book other than `list`."""

    tenant = models.OneToOneField(Tenant, on_delete=models.CASCADE, primary_key=True)
    book = models.ForeignKey(PriceBook, on_delete=models.PROTECT)

    objects = TenantManager()

    def __str__(self) -> str:
        return f"{self.book} for tenant {self.tenant_id}"


class PriceVersion(models.Model):
    """A set of prices of models and tiers, for a price book or for one tenant.

    It is a draft until a second user publishes it. A published version never changes. The sole operator may publish
    a draft of their own: it is then scheduled and has no prices yet. A cancelled one never gets any.
    `billing.rates.price_book` reads `body`.
    """

    class State(models.TextChoices):
        DRAFT = "draft"
        SCHEDULED = "scheduled"
        PUBLISHED = "published"
        DISCARDED = "discarded"
        CANCELLED = "cancelled"

    AUDITED: ClassVar = ("book_id", "tenant_id", "number", "state", "note", "effective_from", "by_sole_operator")
    SOLE_OPERATOR_DELAY: ClassVar = SOLE_OPERATOR_DELAY

    book = models.ForeignKey(PriceBook, on_delete=models.PROTECT)
    tenant_id = models.BigIntegerField(null=True)  # None: the book's own; no foreign key: prices outlive tenants
    number = models.IntegerField(null=True, help_text="counts the book's publications")
    state = models.CharField(max_length=10, choices=State, default=State.DRAFT)
    note = models.CharField(max_length=200, blank=True)
    body = models.JSONField()
    effective_from = models.DateTimeField(null=True, help_text="None, in a draft: when it is published")
    created_at = models.DateTimeField(auto_now_add=True)
    created_by = models.ForeignKey(User, on_delete=models.SET_NULL, null=True, related_name="+")
    decided_at = models.DateTimeField(null=True)
    decided_by = models.ForeignKey(User, on_delete=models.SET_NULL, null=True, related_name="+")
    by_sole_operator = models.BooleanField(
        default=False, db_default=False, help_text="whether the author published it, without a second operator"
    )
    cancelled_at = models.DateTimeField(null=True)
    cancelled_by = models.ForeignKey(User, on_delete=models.SET_NULL, null=True, related_name="+")

    class Meta:
        ordering: ClassVar = ["-id"]
        indexes: ClassVar = [
            models.Index(fields=["effective_from"], name="price_version_scheduled", condition=Q(state="scheduled"))
        ]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["book", "number"], name="price_version_once"),
            models.CheckConstraint(
                name="price_version_published",
                condition=~Q(state__in=["published", "scheduled"])
                | Q(number__isnull=False, effective_from__isnull=False),
            ),
            models.CheckConstraint(
                name="price_version_second_person",
                condition=~Q(state="published")
                | Q(decided_by__isnull=True)
                | ~Q(decided_by=F("created_by"))
                | Q(by_sole_operator=True),
            ),
            models.CheckConstraint(
                name="price_version_sole_operator",
                condition=Q(by_sole_operator=False, cancelled_at__isnull=True)
                & ~Q(state__in=["scheduled", "cancelled"])
                | Q(by_sole_operator=True, state__in=["scheduled", "published"], cancelled_at__isnull=True)
                & Q(effective_from__gte=F("decided_at") + SOLE_OPERATOR_DELAY)
                | Q(by_sole_operator=True, state="cancelled", cancelled_at__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.book}, version {self.number}" if self.number else f"{self.book} ({self.pk})"


class Price(models.Model):
    """The price of a component of a model in a tier, for a range of prompt lengths, of the day and of time.

    Ranges are half-open. A row never changes, except that a later version ends it. Rows cannot overlap. Both rules
    are in `billing/migrations/sql`: `billing_guard_price` and `price_no_overlap`.
    """

    version = models.ForeignKey(PriceVersion, on_delete=models.PROTECT)
    book = models.ForeignKey(PriceBook, on_delete=models.PROTECT)
    tenant_id = models.BigIntegerField(null=True)
    model = models.CharField(max_length=128)
    tier = models.CharField(max_length=10, choices=[(tier.value, tier.value) for tier in Tier])
    component = models.CharField(max_length=20, choices=[(component.value, component.value) for component in Component])
    from_tokens = models.IntegerField(default=0)
    until_tokens = models.IntegerField(default=NO_END)
    from_minute = models.SmallIntegerField(default=0)
    until_minute = models.SmallIntegerField(default=MINUTES_A_DAY)
    from_weekday = models.SmallIntegerField(default=0, db_default=0, help_text="0: Monday")
    until_weekday = models.SmallIntegerField(default=DAYS_A_WEEK, db_default=DAYS_A_WEEK)
    time_zone = models.CharField(max_length=64, default=UTC_ZONE, db_default=UTC_ZONE, help_text="of the ranges")
    nano_per_million = models.BigIntegerField()
    effective_from = models.DateTimeField()
    effective_until = models.DateTimeField(null=True)

    class Meta:
        indexes: ClassVar = [models.Index(fields=["model", "tier"], name="price_model")]
        constraints: ClassVar = [
            models.CheckConstraint(name="price_whole", condition=Q(nano_per_million__range=(0, MAX_NANO_PER_MILLION))),
            models.CheckConstraint(
                name="price_ranges",
                condition=Q(from_tokens__gte=0, from_tokens__lt=F("until_tokens"))
                & Q(from_minute__gte=0, from_minute__lt=F("until_minute"), until_minute__lte=MINUTES_A_DAY)
                & Q(from_weekday__gte=0, from_weekday__lt=F("until_weekday"), until_weekday__lte=DAYS_A_WEEK)
                & (Q(effective_until__isnull=True) | Q(effective_until__gte=F("effective_from"))),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.model} ({self.tier}) {self.component}: {self.nano_per_million}"


class CompiledRateCard(models.Model):
    """The prices of a model and tier for one tenant or all, from an instant on. Only ever added to.

    Its id is the price version that an admission pins. Ids commit in their order, so a reader of all up to one misses
    none before it.
    """

    tenant_id = models.BigIntegerField(null=True)
    model = models.CharField(max_length=128)
    tier = models.CharField(max_length=10)
    effective_from = models.DateTimeField()
    rates = models.BinaryField()

    class Meta:
        indexes: ClassVar = [models.Index(fields=["model", "tier", "tenant_id"], name="compiled_rate_card_model")]

    def __str__(self) -> str:
        return f"rate_card {self.pk} of {self.model} ({self.tier})"

    def decode(self) -> RateCard:
        return RateCard(
            self.pk,
            self.tenant_id,
            self.model,
            Tier(self.tier),
            round(self.effective_from.timestamp() * 1e6),
            decode_rates(self.rates),
        )
