"""Serializers of the usage API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, tzinfo
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from billing.currencies.amounts import FEMTO_DIGITS, NANO_DIGITS, decimal
from billing.metering.usage import BUCKETS, GROUPS, NOT_BY_END_USER, instant, span
from billing.models import ExecutionOutcome, Price, UsageEvent
from billing.rates.pricing import COMPONENTS
from inference_worker.contract.request import PROMPT_CLASSES, TOKEN_CLASSES


@extend_schema_field(OpenApiTypes.DATETIME)
class InstantField(serializers.Field[datetime, str, str, datetime]):
    """A date or a date and time. Without an offset, the query's time zone applies."""

    default_error_messages = {"invalid": "Give a date (2026-11-01) or a time with its offset (2026-11-01T09:00:00Z)."}  # noqa: RUF012

    def to_internal_value(self, data: str) -> datetime:
        try:
            return instant(data, getattr(self.parent, "zone", UTC))
        except ValueError:
            self.fail("invalid")

    def to_representation(self, value: datetime) -> str:
        return value.isoformat().replace("+00:00", "Z")


@extend_schema_field(OpenApiTypes.STR)
class GroupsField(serializers.Field[tuple[str, ...], str, str, tuple[str, ...]]):
    """Comma-separated names of the groups; empty for one total."""

    default_error_messages = {"invalid": "Give a comma-separated list of: " + ", ".join(GROUPS) + "."}  # noqa: RUF012

    def to_internal_value(self, data: str) -> tuple[str, ...]:
        groups = tuple(dict.fromkeys(part.strip() for part in data.split(",") if part.strip()))
        if not set(groups) <= set(GROUPS):
            self.fail("invalid")
        return groups

    def to_representation(self, value: tuple[str, ...]) -> str:
        return ",".join(value)


class _Query(serializers.Serializer[Any]):
    """Query parameters. Unknown names are rejected, so that a misspelled filter never returns too much."""

    tenant = serializers.SlugField(required=False, help_text="The tenant's slug, for users of several tenants.")
    model = serializers.CharField(required=False, max_length=128, help_text="Only this model.")
    key = serializers.IntegerField(required=False, min_value=1, max_value=2**63 - 1, help_text="Only this key's id.")
    project = serializers.IntegerField(
        required=False, min_value=1, max_value=2**63 - 1, help_text="Only this project's id."
    )

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        fields = super().get_fields()
        fields["from"] = InstantField(required=False, help_text="First instant, by time of admission.")
        fields["to"] = InstantField(required=False, help_text="First instant no longer in it; default: now.")
        return fields

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        known = {*self.fields, "cursor", "format"}
        if unknown := sorted(set(self.initial_data) - known):
            raise serializers.ValidationError({name: ["There is no such parameter."] for name in unknown})
        return attrs


@extend_schema_field(OpenApiTypes.STR)
class ZoneField(serializers.Field[tzinfo, str, str, tzinfo]):
    """A time zone by its IANA name."""

    default_error_messages = {"invalid": "Give an IANA time zone, for example America/New_York."}  # noqa: RUF012

    def to_internal_value(self, data: str) -> tzinfo:
        if data == "UTC":
            return UTC
        if data not in available_timezones():
            self.fail("invalid")
        return ZoneInfo(data)

    def to_representation(self, value: tzinfo) -> str:
        return str(value)


class UsageQuery(_Query):
    group_by = GroupsField(default=("model",), help_text=f"Comma-separated: {', '.join(GROUPS)}; empty: one sum.")
    end_user = serializers.CharField(
        required=False,
        allow_blank=True,
        max_length=128,
        trim_whitespace=False,
        help_text="Only this end user; empty: only requests without one.",
    )
    bucket = serializers.ChoiceField(BUCKETS, required=False, help_text="A row for each hour, day or month.")
    tz = ZoneField(
        required=False,
        help_text="Time zone of buckets, of `from` and `to` without an offset, and of the month there is by default:"
        " an IANA name. Default: UTC. For buckets its clocks must be whole hours off from UTC.",
    )

    @property
    def zone(self) -> tzinfo:
        """Return the time zone of the query. An unknown name is reported by its own field."""
        try:
            time_zone: tzinfo = ZoneField().run_validation(self.initial_data.get("tz", "UTC"))
        except serializers.ValidationError:
            return UTC
        return time_zone

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        attrs = super().validate(attrs)
        attrs["tz"] = attrs.get("tz", UTC)
        self._check_end_users(attrs)
        try:
            attrs["from"], attrs["to"] = span(attrs.get("from"), attrs.get("to"), attrs["tz"])
        except ValueError as exc:
            raise serializers.ValidationError({"from": [f"It {exc}."]}) from exc
        return attrs

    @staticmethod
    def _check_end_users(attrs: dict[str, Any]) -> None:
        """Reject groups and buckets that the sums by end user do not have."""
        if "end_user" not in attrs["group_by"] and "end_user" not in attrs:
            return
        if taken := [group for group in NOT_BY_END_USER if group in attrs["group_by"]]:
            message = f"Usage by end user has no {' and no '.join(taken)}."
            raise serializers.ValidationError({"group_by": [message]})
        if attrs.get("bucket") == "hour" or (attrs.get("bucket") and attrs["tz"] is not UTC):
            message = "Usage by end user is summed by UTC day: use the buckets day or month, and no time zone."
            raise serializers.ValidationError({"bucket": [message]})


class UsageEventQuery(_Query):
    request_id = serializers.CharField(required=False, max_length=64, help_text="Only this request's executions.")
    limit = serializers.IntegerField(
        required=False, min_value=1, max_value=200, help_text="Events per page. Default: 50."
    )
    outcome = serializers.ChoiceField(
        ExecutionOutcome.choices, required=False, help_text="Only executions that ended so."
    )

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        attrs = super().validate(attrs)
        if "from" in attrs and "to" in attrs and attrs["from"] >= attrs["to"]:
            raise serializers.ValidationError({"from": ["It must be before `to`."]})
        return attrs


def _part(names: tuple[str, ...]) -> Callable[[Any], dict[str, Any]]:
    return lambda row: {name: row[name] if isinstance(row, dict) else getattr(row, name) for name in names}


class UsageTokensSerializer(serializers.Serializer[Any]):
    """Tokens by billing class. `input` is the sum of the four input classes."""

    input = serializers.IntegerField()
    output = serializers.IntegerField()

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        return {**{name: serializers.IntegerField() for name in PROMPT_CLASSES}, **super().get_fields()}

    def to_representation(self, instance: Any) -> dict[str, int]:
        tokens = _part(TOKEN_CLASSES)(instance)
        output = tokens.pop("output")
        return {**tokens, "input": sum(tokens.values()), "output": output}


class UsageRequestsSerializer(serializers.Serializer[Any]):
    """Numbers of requests by outcome; a request counts once for each execution."""

    completed = serializers.IntegerField()
    cancelled = serializers.IntegerField()
    failed = serializers.IntegerField(help_text="Never billed; their tokens are in no sum.")

    def to_representation(self, instance: Any) -> dict[str, int]:
        return _part(tuple(ExecutionOutcome.values))(instance)


class AnswerHitTokensSerializer(serializers.Serializer[Any]):
    """Tokens that cached answers made unnecessary. They are in no other sum."""

    input = serializers.IntegerField(source="answer_hit_input")
    output = serializers.IntegerField(source="answer_hit_output")


class UsageCostSerializer(serializers.Serializer[Any]):
    """The cost and the cache savings in exact USD, with up to 15 decimals."""

    usd = serializers.CharField()
    saved_usd = serializers.CharField(help_text="Negative if cache writes cost more than reads saved.")

    def to_representation(self, instance: Any) -> dict[str, str]:
        part = _part(("cost_femto", "saved_femto"))(instance)
        return {"usd": usd(int(part["cost_femto"])), "saved_usd": usd(int(part["saved_femto"]))}


def usd(femto: int) -> str:
    """Convert femto-USD to decimal USD with all digits."""
    return decimal(femto, FEMTO_DIGITS, 2)


class UsageTotalsSerializer(serializers.Serializer[Any]):
    """The sums of a set of events."""

    requests = UsageRequestsSerializer(source="*")
    tokens = UsageTokensSerializer(source="*")
    answer_hits = AnswerHitTokensSerializer(source="*")
    unpinned_tokens = serializers.IntegerField(
        help_text="Marked for caching, but not pinned because a limit was reached."
    )
    reasoning_tokens = serializers.IntegerField(help_text="The part of the output before the answers.")
    searches = serializers.IntegerField(help_text="Searches of cross-encoders.")
    cost = UsageCostSerializer(source="*")


class UsageRowSerializer(UsageTotalsSerializer):
    """The sums of one group, with the group's values, and `start` if there is a bucket."""

    start = InstantField(required=False, help_text="The bucket's first instant.")
    model = serializers.CharField(required=False)
    key_id = serializers.IntegerField(required=False)
    project_id = serializers.IntegerField(required=False)
    tier = serializers.CharField(required=False, help_text="The service tier; empty if not priced.")
    miss_reason = serializers.CharField(
        required=False, help_text="The reason of a prefix cache miss; empty without one."
    )
    end_user = serializers.CharField(
        required=False,
        allow_null=True,
        help_text="`user` of the requests; empty without one; null: the end users beyond the 1000 with the highest"
        " cost of a key and day, together.",
    )


class UsageReportSerializer(serializers.Serializer[Any]):
    tenant = serializers.CharField()
    group_by = serializers.ListField(child=serializers.ChoiceField(GROUPS))
    bucket = serializers.ChoiceField(BUCKETS, allow_null=True)
    tz = ZoneField()
    rows = UsageRowSerializer(many=True)
    total = UsageTotalsSerializer()

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        fields = super().get_fields()
        return {"tenant": fields.pop("tenant"), "from": InstantField(), "to": InstantField(), **fields}


class UsageEventLineSerializer(serializers.Serializer[Any]):
    """Tokens of one class, or searches, at one price: tokens x price is the cost, exactly."""

    component = serializers.ChoiceField([each.value for each in COMPONENTS])
    tokens = serializers.IntegerField()
    price_id = serializers.IntegerField()
    usd_per_million = serializers.CharField()
    usd = serializers.CharField()


class UsageEventSerializer(serializers.ModelSerializer[UsageEvent]):
    """An execution as metered and priced. The context has the price book's `prices` and the `cost_centers`, by id."""

    tokens = UsageTokensSerializer(source="*")
    answer_hits = AnswerHitTokensSerializer(source="*")
    cost = UsageCostSerializer(source="*")
    lines = serializers.SerializerMethodField(help_text="Empty if not billed.")
    cost_center = serializers.SerializerMethodField(help_text="The cost center that the key has now; empty: none.")
    miss_reason = serializers.CharField(help_text="The reason of a prefix cache miss; empty without one.")

    def get_cost_center(self, event: UsageEvent) -> str:
        centers: Mapping[int, str] = self.context.get("cost_centers", {})
        return centers.get(event.key_id, "")

    @extend_schema_field(UsageEventLineSerializer(many=True))
    def get_lines(self, event: UsageEvent) -> list[dict[str, Any]]:
        prices: Mapping[int, Price] = self.context.get("prices", {})
        found = []
        for component, price_id in zip(COMPONENTS, event.price_ids or (), strict=False):
            if price_id is not None and price_id in prices:
                price, tokens = prices[price_id], getattr(event, component)
                found.append(
                    {
                        "component": component.value,
                        "tokens": tokens,
                        "price_id": price_id,
                        "usd_per_million": decimal(price.nano_per_million, NANO_DIGITS, 2),
                        "usd": usd(tokens * price.nano_per_million),
                    }
                )
        return found

    class Meta:
        model = UsageEvent
        fields = (
            "request_id",
            "execution",
            "admitted_at",
            "settled_at",
            "project_id",
            "key_id",
            "cost_center",
            "model",
            "outcome",
            "finish_reason",
            "attempt",
            "tokens",
            "answer_hits",
            "miss_reason",
            "changed_at",
            "unpinned_tokens",
            "reasoning_tokens",
            "searches",
            "usage_source",
            "unbilled_tokens",
            "cost",
            "lines",
            "queue_us",
            "ttft_us",
            "duration_us",
            "price_version",
        )
        read_only_fields = fields
