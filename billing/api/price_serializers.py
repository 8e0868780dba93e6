"""Serializers of the price API. Prices are exact decimals in USD per million tokens, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from billing.api.usage_serializers import InstantField, usd
from billing.currencies.amounts import NANO_DIGITS, decimal
from billing.currencies.iso_codes import CURRENCY_CODES
from billing.models import PriceBook, PriceVersion
from billing.rates.price_book import MAX_NAME_LENGTH, MAX_ZONE_LENGTH, nano_per_million, parse
from billing.rates.price_files import minute, weekdays, weekdays_text
from billing.rates.pricing import MINUTES_A_DAY, NO_END, UTC_ZONE, Component, Tier
from tenants.api.serializers import MAX_BIGINT, Query, StrictSerializer

SERVICE_TIERS = [tier.value for tier in Tier]
COMPONENTS = [component.value for component in Component]
IMPORT_FILE_TYPES = ("json", "csv")
MAX_FILE_CHARACTERS = 8_000_000  # characters


class NestedPart(serializers.Serializer[Any]):
    """A nested object that rejects unknown fields."""

    def to_internal_value(self, data: Any) -> Any:
        if unknown := sorted(set(data) - set(self.fields) if isinstance(data, Mapping) else ()):
            raise serializers.ValidationError({str(name): ["There is no such field."] for name in unknown})
        return super().to_internal_value(data)


class DecimalText(serializers.CharField):
    """A decimal as text, since JSON numbers are parsed as floats."""

    def to_internal_value(self, data: Any) -> str:
        if not isinstance(data, str):
            raise serializers.ValidationError('Give it as text, for example "3.75".')
        return str(super().to_internal_value(data))


class PriceCreateSerializer(NestedPart):
    """A price for half-open ranges of prompt lengths and times of day."""

    model = serializers.CharField(max_length=MAX_NAME_LENGTH)
    tier = serializers.ChoiceField(SERVICE_TIERS, default=Tier.STANDARD.value)
    component = serializers.ChoiceField(COMPONENTS)
    usd_per_million = DecimalText(max_length=40, help_text="For example 3.75.")
    from_tokens = serializers.IntegerField(min_value=0, max_value=NO_END, default=0, help_text="Of the whole prompt.")
    until_tokens = serializers.IntegerField(min_value=1, max_value=NO_END, default=NO_END)
    from_time = serializers.CharField(default="00:00", help_text="Of the UTC day, HH:MM, in the time zone.")
    until_time = serializers.CharField(default="24:00")
    weekdays = serializers.CharField(default="", allow_blank=True, help_text="For example mon-fri or sat. Empty: all.")
    time_zone = serializers.CharField(default=UTC_ZONE, max_length=MAX_ZONE_LENGTH, help_text="Of times and weekdays.")

    def validate_weekdays(self, value: str) -> tuple[int, int]:
        try:
            return weekdays(value)
        except ValueError as exc:
            raise serializers.ValidationError(f"{exc}.") from exc

    def validate_usd_per_million(self, value: str) -> int:
        return _check_rate(nano_per_million, value)

    def validate_from_time(self, value: str) -> int:
        return _check_rate(minute, value)

    def validate_until_time(self, value: str) -> int:
        return _check_rate(minute, value)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        names = {"usd_per_million": "nano_per_million", "from_time": "from_minute", "until_time": "until_minute"}
        found = {names.get(name, name): value for name, value in attrs.items()}
        first, last = found.pop("weekdays")
        found |= {"from_weekday": first, "until_weekday": last}
        return found | {"tier": Tier(found["tier"]), "component": Component(found["component"])}


def _check_rate(read: Any, value: str) -> int:
    try:
        return int(read(value))
    except ValueError as exc:
        raise serializers.ValidationError(f"{exc}.") from exc


class ModelTierSerializer(NestedPart):
    """A model in a service tier."""

    model = serializers.CharField(max_length=MAX_NAME_LENGTH)
    tier = serializers.ChoiceField(SERVICE_TIERS, default=Tier.STANDARD.value)

    def validate_tier(self, value: str) -> Tier:
        return Tier(value)


class PriceDraftFieldsSerializer(StrictSerializer):
    tenant_id = serializers.IntegerField(required=False, min_value=1, max_value=MAX_BIGINT, help_text="Its own prices.")
    book = serializers.SlugField(max_length=50, default=PriceBook.LIST)
    currency = serializers.ChoiceField(CURRENCY_CODES, required=False, help_text="Of a new book.")
    effective_from = serializers.DateTimeField(required=False, help_text="Default: the time of publication.")
    note = serializers.CharField(max_length=200, required=False)
    allow_unpriced_hours = serializers.BooleanField(
        required=False, help_text="Draft prices that leave hours of the day without a price."
    )


class PriceVersionCreateSerializer(PriceDraftFieldsSerializer):
    prices = PriceCreateSerializer(many=True, required=False)
    withdrawn = ModelTierSerializer(
        many=True, required=False, help_text="Models and tiers without a price from then on."
    )


class PriceImportCreateSerializer(PriceDraftFieldsSerializer):
    file_type = serializers.ChoiceField(IMPORT_FILE_TYPES)
    content = serializers.CharField(max_length=MAX_FILE_CHARACTERS, trim_whitespace=False, help_text="The file's text.")
    models = serializers.ListField(
        child=serializers.CharField(), required=False, help_text="Only these, of a public price file."
    )
    round = serializers.BooleanField(
        required=False, help_text="Round prices that are not whole nano-USD per million tokens."
    )


class VersionQuery(Query):
    state = serializers.ChoiceField(PriceVersion.State.choices, required=False)
    tenant_id = serializers.IntegerField(required=False, min_value=1, max_value=MAX_BIGINT)
    book = serializers.SlugField(required=False, max_length=50)
    names = {"book": "book__name"}  # noqa: RUF012


class PriceVersionSerializer(serializers.ModelSerializer[PriceVersion]):
    book = serializers.CharField(source="book.name")
    currency = serializers.CharField()
    created_by = serializers.EmailField(source="created_by.email", default=None, allow_null=True)
    decided_by = serializers.EmailField(source="decided_by.email", default=None, allow_null=True)
    cancelled_by = serializers.EmailField(source="cancelled_by.email", default=None, allow_null=True)

    class Meta:
        model = PriceVersion
        fields: tuple[str, ...] = (
            *("id", "book", "currency", "tenant_id", "number", "state", "note", "effective_from"),
            *("created_at", "created_by", "decided_at", "decided_by"),
            *("by_sole_operator", "cancelled_at", "cancelled_by"),
        )
        read_only_fields = fields


class PriceSerializer(serializers.Serializer[Any]):
    """A price with half-open ranges."""

    model = serializers.CharField()
    tier = serializers.ChoiceField(SERVICE_TIERS)
    component = serializers.ChoiceField(COMPONENTS)
    usd_per_million = serializers.CharField()
    from_tokens = serializers.IntegerField()
    until_tokens = serializers.IntegerField(allow_null=True)
    from_time = serializers.CharField()
    until_time = serializers.CharField()
    weekdays = serializers.CharField(help_text="Empty for all.")
    time_zone = serializers.CharField()

    def to_representation(self, instance: Any) -> dict[str, Any]:
        return {
            "model": instance.model,
            "tier": str(instance.tier),
            "component": str(instance.component),
            "usd_per_million": decimal(instance.nano_per_million, NANO_DIGITS, 2),
            "from_tokens": instance.from_tokens,
            "until_tokens": None if instance.until_tokens == NO_END else instance.until_tokens,
            "from_time": _time(instance.from_minute),
            "until_time": _time(instance.until_minute),
            "weekdays": weekdays_text(instance),
            "time_zone": instance.time_zone,
        }


def _time(at: int) -> str:
    return f"{at // 60:02}:{at % 60:02}" if at < MINUTES_A_DAY else "24:00"


class PriceVersionDetailSerializer(PriceVersionSerializer):
    prices = serializers.SerializerMethodField()
    withdrawn = serializers.SerializerMethodField()

    class Meta(PriceVersionSerializer.Meta):
        fields = (*PriceVersionSerializer.Meta.fields, "prices", "withdrawn")
        read_only_fields = fields

    @extend_schema_field(PriceSerializer(many=True))
    def get_prices(self, version: PriceVersion) -> list[dict[str, Any]]:
        return [dict(row) for row in PriceSerializer(parse(version.body).prices, many=True).data]

    @extend_schema_field(ModelTierSerializer(many=True))
    def get_withdrawn(self, version: PriceVersion) -> list[dict[str, str]]:
        return [{"model": model, "tier": str(tier)} for model, tier in parse(version.body).withdrawn]


class ImportOmissionsSerializer(serializers.Serializer[Any]):
    not_whole = serializers.ListField(child=serializers.CharField(), help_text="Not whole nano-USD per million tokens.")
    rounded = serializers.BooleanField(help_text="They are taken, rounded.")
    refused = serializers.ListField(child=serializers.CharField(), help_text="No prices at all.")
    unpriced = serializers.ListField(child=serializers.CharField(), help_text="Models without a price per token.")
    free = serializers.ListField(child=serializers.CharField(), help_text="Models that are free, as the file says.")
    assumed = serializers.ListField(
        child=serializers.CharField(), help_text="Imported prices that the file does not have, with their source."
    )
    other_fields = serializers.DictField(
        child=serializers.IntegerField(), help_text="Prices of units that are not metered."
    )


class PriceImportSerializer(serializers.Serializer[Any]):
    version = PriceVersionSerializer()
    left_out = ImportOmissionsSerializer()


class PreviewQuery(Query):
    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        return super().get_fields() | {"from": InstantField(required=False), "to": InstantField(required=False)}


class PricesQuery(Query):
    model = serializers.CharField(required=False, max_length=MAX_NAME_LENGTH)


class PricePreviewSerializer(serializers.Serializer[Any]):
    """A tenant's usage of a model at current and at proposed prices."""

    tenant_id = serializers.IntegerField()
    model = serializers.CharField()
    events = serializers.IntegerField()
    was_usd = serializers.CharField()
    would_be_usd = serializers.CharField()
    unpriced = serializers.IntegerField(help_text="Events that would have been rejected; in neither sum.")

    def to_representation(self, instance: Any) -> dict[str, Any]:
        return {
            "tenant_id": instance.tenant_id,
            "model": instance.model,
            "events": instance.events,
            "was_usd": usd(instance.was_femto),
            "would_be_usd": usd(instance.would_be_femto),
            "unpriced": instance.unpriced,
        }


class TenantProjectionSerializer(serializers.Serializer[Any]):
    """A tenant's usage of the month with its price terms, before tax, in the minor unit of the currency."""

    tenant_id = serializers.IntegerField(source="tenant.pk")
    slug = serializers.CharField(source="tenant.slug")
    was_cents = serializers.IntegerField(source="was")
    would_be_cents = serializers.IntegerField(source="would_be")


class PriceProjectionSerializer(serializers.Serializer[Any]):
    """A month as it was charged, and at the prices of a version."""

    month = serializers.CharField()
    currency = serializers.CharField()
    was_cents = serializers.IntegerField(source="was")
    would_be_cents = serializers.IntegerField(source="would_be")
    tenants = TenantProjectionSerializer(many=True, help_text="The largest change first.")
    other_tenants = serializers.IntegerField(
        source="others", help_text="With usage of the models, and not computed: those with the least usage."
    )
    unpriced_tokens = serializers.IntegerField(
        source="unpriced", help_text="They would be rejected without a price; in neither sum."
    )
    kept_tokens = serializers.IntegerField(
        source="kept", help_text="Their price stays as charged, since the new prices have other bands or hours."
    )


class ProjectionQuery(Query):
    month = serializers.RegexField(r"^20\d\d-(0[1-9]|1[0-2])$", required=False, help_text="Default: the last month.")


class SoleOperatorSerializer(StrictSerializer):
    password = serializers.CharField(
        max_length=1000, trim_whitespace=False, write_only=True, help_text="Of the caller, the sole operator."
    )


class PriceBookAssignmentSerializer(StrictSerializer):
    book = serializers.SlugField(max_length=50)


class TenantPriceBookSerializer(serializers.Serializer[Any]):
    """The price book of a tenant."""

    book = serializers.CharField()
    currency = serializers.CharField(help_text="ISO 4217, such as USD. The tenant is billed in it.")
