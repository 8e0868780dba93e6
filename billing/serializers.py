"""The usage API's questions and answers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from billing.models import TOKEN_CLASSES, UsageEvent, Verdict
from billing.usage import BUCKETS, GROUPS, instant, span


@extend_schema_field(OpenApiTypes.DATETIME)
class InstantField(serializers.Field[datetime, str, str, datetime]):
    """A date or a date and time, as a point in time."""

    default_error_messages = {"invalid": "Give a date (2026-11-01) or a time with its offset (2026-11-01T09:00:00Z)."}  # noqa: RUF012

    def to_internal_value(self, data: str) -> datetime:
        try:
            return instant(data)
        except ValueError:
            self.fail("invalid")

    def to_representation(self, value: datetime) -> str:
        return value.isoformat().replace("+00:00", "Z")


@extend_schema_field(OpenApiTypes.STR)
class GroupsField(serializers.Field[tuple[str, ...], str, str, tuple[str, ...]]):
    """Comma-separated names of what to group by; empty for one sum over all."""

    default_error_messages = {"invalid": "Give a comma-separated list of: " + ", ".join(GROUPS) + "."}  # noqa: RUF012

    def to_internal_value(self, data: str) -> tuple[str, ...]:
        groups = tuple(dict.fromkeys(part.strip() for part in data.split(",") if part.strip()))
        if not set(groups) <= set(GROUPS):
            self.fail("invalid")
        return groups

    def to_representation(self, value: tuple[str, ...]) -> str:
        return ",".join(value)


class _Query(serializers.Serializer[Any]):
    """Query parameters: a name that is not known is refused, so that a misspelt filter never shows too much."""

    tenant = serializers.SlugField(required=False, help_text="The tenant's slug, for people who may see several.")
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


class UsageQuery(_Query):
    group_by = GroupsField(default=("model",), help_text="Comma-separated: model, key, project; empty: one sum.")
    bucket = serializers.ChoiceField(BUCKETS, required=False, help_text="A row for each hour or day (UTC).")

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        attrs = super().validate(attrs)
        try:
            attrs["from"], attrs["to"] = span(attrs.get("from"), attrs.get("to"))
        except ValueError as fault:
            raise serializers.ValidationError({"from": [f"It {fault}."]}) from fault
        return attrs


class EventQuery(_Query):
    request_id = serializers.CharField(required=False, max_length=64, help_text="Only this request's legs.")
    limit = serializers.IntegerField(required=False, min_value=1, max_value=200, help_text="Events on a page; 50.")
    verdict = serializers.ChoiceField(Verdict.choices, required=False, help_text="Only legs that ended so.")

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        attrs = super().validate(attrs)
        if "from" in attrs and "to" in attrs and attrs["from"] >= attrs["to"]:
            raise serializers.ValidationError({"from": ["It must be before `to`."]})
        return attrs


def _part(names: tuple[str, ...]) -> Callable[[Any], dict[str, Any]]:
    return lambda row: {name: row[name] if isinstance(row, dict) else getattr(row, name) for name in names}


class TokensOut(serializers.Serializer[Any]):
    """Tokens by billing class. `input` is the sum of the four input classes."""

    uncached = serializers.IntegerField()
    cache_read = serializers.IntegerField()
    cache_write_5m = serializers.IntegerField()
    cache_write_1h = serializers.IntegerField()
    input = serializers.IntegerField()
    output = serializers.IntegerField()

    def to_representation(self, instance: Any) -> dict[str, int]:
        tokens = _part(TOKEN_CLASSES)(instance)
        output = tokens.pop("output")
        return {**tokens, "input": sum(tokens.values()), "output": output}


class RequestsOut(serializers.Serializer[Any]):
    """Requests by how they ended (a request of several legs counts once for each)."""

    completed = serializers.IntegerField()
    cancelled = serializers.IntegerField()
    failed = serializers.IntegerField(help_text="Never billed; their tokens are in no sum.")

    def to_representation(self, instance: Any) -> dict[str, int]:
        return _part(tuple(Verdict.values))(instance)


class CountsOut(serializers.Serializer[Any]):
    """What a set of events adds up to."""

    requests = RequestsOut(source="*")
    tokens = TokensOut(source="*")


class UsageRowOut(serializers.Serializer[Any]):
    """One group's sums. `model`, `key_id` and `project_id` are there if grouped by, `start` if there is a bucket."""

    start = serializers.DateTimeField(required=False, help_text="The bucket's first instant.")
    model = serializers.CharField(required=False)
    key_id = serializers.IntegerField(required=False)
    project_id = serializers.IntegerField(required=False)
    requests = RequestsOut(source="*")
    tokens = TokensOut(source="*")


class UsageOut(serializers.Serializer[Any]):
    tenant = serializers.CharField()
    group_by = serializers.ListField(child=serializers.ChoiceField(GROUPS))
    bucket = serializers.ChoiceField(BUCKETS, allow_null=True)
    rows = UsageRowOut(many=True)
    total = CountsOut()

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        fields = super().get_fields()
        return {"tenant": fields.pop("tenant"), "from": InstantField(), "to": InstantField(), **fields}


class UsageEventOut(serializers.ModelSerializer[UsageEvent]):
    """One leg of a request, as it was metered."""

    tokens = TokensOut(source="*")

    class Meta:
        model = UsageEvent
        fields = (
            "request_id",
            "leg",
            "admitted_at",
            "settled_at",
            "project_id",
            "key_id",
            "model",
            "verdict",
            "finish_reason",
            "attempt",
            "tokens",
            "queue_us",
            "ttft_us",
            "duration_us",
            "price_version",
        )
        read_only_fields = fields
