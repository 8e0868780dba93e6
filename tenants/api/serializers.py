"""Serializers of the management API: request bodies, query parameters and responses."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from tenants.actions.keys import MAX_OVERLAP
from tenants.api.target_problems import TargetProblemSerializer, WithProblems
from tenants.keys import snapshot
from tenants.models import (
    LIMITS,
    ApiKey,
    AuditEntry,
    Invitation,
    LimitSet,
    Membership,
    OutboxEmail,
    Project,
    RoutingPolicy,
    Tenant,
)
from tenants.models.keys import MAX_COST_CENTER_LENGTH
from tenants.one_line_text import check_line
from tenants.tenant_settings import SETTINGS, TenantSetting

MAX_BIGINT = 2**63 - 1
RATE_LIMIT_SCOPES = ("tenant", "project", "key")


class StrictSerializer(serializers.Serializer[Any]):
    """A serializer that rejects unknown fields, so that a misspelled field is not ignored."""

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        sent = self.initial_data if isinstance(self.initial_data, Mapping) else {}
        if unknown := sorted(set(sent) - set(self.fields)):
            raise serializers.ValidationError({str(name): ["Unknown field."] for name in unknown})
        if self.partial and not attrs:
            raise serializers.ValidationError("Send at least one field.")
        return attrs


class StrictModelSerializer(serializers.ModelSerializer[Any]):
    """A model serializer that rejects unknown fields."""

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if unknown := sorted(set(self.initial_data) - set(self.fields)):
            raise serializers.ValidationError({str(name): ["There is no such field."] for name in unknown})
        return attrs


class Query(StrictSerializer):
    """Query parameters of a list. Subclasses add filters to those that every list has."""

    tenant = serializers.CharField(required=False, help_text="The tenant's slug, for users with several tenants.")
    cursor = serializers.CharField(required=False, help_text="From `next` or `previous` of another page.")
    limit = serializers.IntegerField(
        required=False, min_value=1, max_value=200, help_text="Rows per page; default: 50."
    )

    def filters(self) -> dict[str, Any]:
        """Return the filters as model lookups. `names` maps parameters to lookups where they differ."""
        names: Mapping[str, str] = getattr(self, "names", {})
        return {
            names.get(name, name): value
            for name, value in self.validated_data.items()
            if name not in ("tenant", "cursor", "limit")
        }


def _id(help_text: str, **options: Any) -> serializers.IntegerField:
    return serializers.IntegerField(min_value=1, max_value=MAX_BIGINT, help_text=help_text, **options)


# Tenant and projects


class TenantSerializer(serializers.ModelSerializer[Tenant]):
    allowed_origins = serializers.ListField(child=serializers.CharField(), read_only=True)

    class Meta:
        model = Tenant
        fields = ("id", "slug", "name", "status", "is_demo", "created_at", "purge_after", *SETTINGS)
        read_only_fields = fields


class TenantCreateSerializer(StrictSerializer):
    slug = serializers.SlugField(max_length=50)
    name = serializers.CharField(max_length=200)
    owner_email = serializers.EmailField(required=False, help_text="Email address that is invited as owner.")


class TenantUpdateSerializer(StrictSerializer):
    name = serializers.CharField(max_length=200)

    def get_fields(self) -> dict[str, Any]:
        return {**super().get_fields(), **{name: _setting_field(setting) for name, setting in SETTINGS.items()}}


def _setting_field(setting: TenantSetting) -> serializers.Field[Any, Any, Any, Any]:
    """Return the field of a setting in requests."""
    if setting.choices is not None:
        return serializers.ChoiceField(list(setting.choices.items()), help_text=setting.help)
    if setting.maximum is not None:
        return serializers.IntegerField(min_value=0, max_value=setting.maximum, help_text=setting.help)
    if setting.max_items:
        item = serializers.CharField(max_length=setting.max_length)
        return serializers.ListField(child=item, max_length=setting.max_items, help_text=setting.help)
    return serializers.BooleanField(help_text=setting.help)


class NameUpdateSerializer(StrictSerializer):
    name = serializers.CharField(max_length=200)


class ProjectSerializer(serializers.ModelSerializer[Project]):
    class Meta:
        model = Project
        fields = ("id", "slug", "name", "created_at")
        read_only_fields = fields


class ProjectCreateSerializer(StrictSerializer):
    slug = serializers.SlugField(
        max_length=50, required=False, help_text="Cannot be changed. Derived from the name if omitted."
    )
    name = serializers.CharField(max_length=200)


class ProjectQuery(Query):
    slug = serializers.CharField(required=False)


# Keys


class ApiKeySerializer(serializers.ModelSerializer[ApiKey]):
    """A key without its secret. The secret is shown only when the key is created."""

    project_id = serializers.IntegerField()
    replaces_id = serializers.IntegerField(allow_null=True, help_text="ID of the key that this key replaces.")
    created_by = serializers.EmailField(source="created_by.email", default=None, allow_null=True)
    last_used_at = serializers.DateTimeField(source="usage.last_used_at", default=None, allow_null=True)
    live = serializers.BooleanField(source="is_live")

    class Meta:
        model = ApiKey
        fields = (
            "id",
            "name",
            "prefix",
            "project_id",
            "scopes",
            "allowed_models",
            "allowed_ip_ranges",
            "cost_center",
            "created_at",
            "created_by",
            "expires_at",
            "revoked_at",
            "replaces_id",
            "last_used_at",
            "live",
        )
        read_only_fields = fields


class ApiKeyWithSecretSerializer(ApiKeySerializer):
    secret = serializers.CharField(help_text="The API key. It is shown only once.")

    class Meta(ApiKeySerializer.Meta):
        fields = (*ApiKeySerializer.Meta.fields, "secret")  # type: ignore[assignment]
        read_only_fields = fields  # type: ignore[assignment]


class _KeyFields(StrictSerializer):
    scopes = serializers.ListField(
        child=serializers.ChoiceField(snapshot.SCOPES), allow_empty=False, max_length=len(snapshot.SCOPES)
    )
    allowed_models = serializers.ListField(
        child=serializers.CharField(max_length=64), allow_null=True, required=False, max_length=100
    )
    allowed_ip_ranges = serializers.ListField(
        child=serializers.CharField(max_length=43),
        allow_null=True,
        required=False,
        max_length=100,
        help_text="IP addresses and networks that may use the key, such as 192.0.2.7 or 10.0.0.0/8; null: all.",
    )
    cost_center = serializers.CharField(
        max_length=MAX_COST_CENTER_LENGTH,
        allow_blank=True,
        required=False,
        validators=[check_line],
        help_text="By which invoices divide the usage; empty: none.",
    )
    expires_at = serializers.DateTimeField(allow_null=True, required=False)


class ApiKeyCreateSerializer(_KeyFields):
    project_id = _id("ID of the key's project; default: the project `default`.", required=False)
    name = serializers.CharField(max_length=200)

    def get_fields(self) -> dict[str, Any]:
        fields = super().get_fields()
        fields["scopes"].required = False
        return fields


class ApiKeyUpdateSerializer(_KeyFields):
    name = serializers.CharField(max_length=200)


class ApiKeyRotationSerializer(StrictSerializer):
    overlap_hours = serializers.IntegerField(
        default=24,
        min_value=0,
        max_value=MAX_OVERLAP // timedelta(hours=1),
        help_text="Hours for which the old key remains valid.",
    )


class KeyQuery(Query):
    names = {"project": "project_id", "live": "live"}  # noqa: RUF012
    project = _id("ID of the project.", required=False)
    live = serializers.BooleanField(
        required=False, default=None, allow_null=True, help_text="True: active keys; false: expired or revoked ones."
    )
    prefix = serializers.CharField(required=False, max_length=20)


# Members


class MemberSerializer(serializers.ModelSerializer[Membership]):
    email = serializers.EmailField(source="user.email")
    name = serializers.CharField(source="user.name")

    class Meta:
        model = Membership
        fields = ("id", "email", "name", "role", "created_at")
        read_only_fields = fields


class MemberUpdateSerializer(StrictSerializer):
    role = serializers.ChoiceField(Membership.Role.choices)


class MemberQuery(Query):
    names = {"email": "user__email__iexact"}  # noqa: RUF012
    role = serializers.ChoiceField(Membership.Role.choices, required=False)
    email = serializers.CharField(required=False, max_length=254)


class InvitationSerializer(serializers.ModelSerializer[Invitation]):
    """An invitation. Its link is sent only to the invited email address."""

    open = serializers.BooleanField(source="is_open")
    delivery_state = serializers.ChoiceField(
        OutboxEmail.State.choices,
        source="outbox_email.state",
        default=None,
        allow_null=True,
        help_text="State of the email: queued (also while it is retried), sent or failed; null if it was deleted.",
    )
    delivery_error = serializers.CharField(
        source="outbox_email.error",
        default=None,
        allow_null=True,
        help_text="Why the last attempt to send the email failed; empty if it did not.",
    )

    class Meta:
        model = Invitation
        fields = (
            "id", "email", "role", "created_at", "expires_at", "accepted_at", "revoked_at", "open",
            "delivery_state", "delivery_error",
        )  # fmt: skip
        read_only_fields = fields


class InvitationCreateSerializer(StrictSerializer):
    email = serializers.EmailField()
    role = serializers.ChoiceField(Membership.Role.choices)


class InvitationQuery(Query):
    names = {"email": "email__iexact"}  # noqa: RUF012
    email = serializers.CharField(required=False, max_length=254)
    role = serializers.ChoiceField(Membership.Role.choices, required=False)


# Limits and policies


class RateLimitsSerializer(serializers.ModelSerializer[LimitSet]):
    scope = serializers.ChoiceField(RATE_LIMIT_SCOPES)
    project_id = serializers.IntegerField(allow_null=True)
    key_id = serializers.IntegerField(allow_null=True)

    class Meta:
        model = LimitSet
        fields = ("id", "scope", "project_id", "key_id", "model", "set_by_operator", "dry_run", *LIMITS, "updated_at")
        read_only_fields = fields


class RateLimitsUpdateSerializer(StrictSerializer):
    """Limits of the tenant, or of the given project or key. Omitted limits are removed."""

    project_id = _id("ID of the project that the limits apply to.", required=False, allow_null=True)
    key_id = _id("ID of the API key that the limits apply to.", required=False, allow_null=True)
    model = serializers.CharField(
        required=False,
        allow_blank=True,
        max_length=64,
        help_text="Model that the limits apply to; empty: all models together.",
    )
    set_by_operator = serializers.BooleanField(
        required=False, help_text="Set by the operator. Only operators may send true."
    )
    dry_run = serializers.BooleanField(
        required=False, help_text="Reject nothing, and count the requests that would be rejected."
    )

    def get_fields(self) -> dict[str, Any]:
        limits = {
            name: serializers.IntegerField(required=False, allow_null=True, min_value=0, max_value=MAX_BIGINT)
            for name in LIMITS
        }
        return {**super().get_fields(), **limits}


class LimitsQuery(Query):
    names = {"project": "project_id", "key": "key_id"}  # noqa: RUF012
    project = _id("ID of the project.", required=False)
    key = _id("ID of the API key.", required=False)
    model = serializers.CharField(required=False, max_length=64)


class PolicySerializer(WithProblems, serializers.ModelSerializer[RoutingPolicy]):
    body = serializers.DictField()
    problems = serializers.SerializerMethodField(help_text="Models of an active version that cannot serve requests.")

    class Meta:
        model = RoutingPolicy
        fields = ("id", "name", "version", "body", "active", "problems", "created_at")
        read_only_fields = fields

    @extend_schema_field(TargetProblemSerializer(many=True))
    def get_problems(self, row: RoutingPolicy) -> list[dict[str, Any]]:
        return self.problem_fields(self.target_checks(row.tenant_id).of_live(row))


class PolicyCreateSerializer(StrictSerializer):
    name = serializers.CharField(max_length=64)
    body = serializers.DictField()


class PolicyPublishSerializer(PolicyCreateSerializer):
    base_version = serializers.IntegerField(
        required=False,
        min_value=0,
        max_value=MAX_BIGINT,
        help_text="The active version that the change is based on; 0: none. If another version is active, the response "
        "is 409 with the code `version_conflict`. Default: not checked.",
    )


class PolicyQuery(Query):
    name = serializers.CharField(required=False, max_length=64)
    active = serializers.BooleanField(required=False, default=None, allow_null=True)


# Audit


class AuditEntrySerializer(serializers.ModelSerializer[AuditEntry]):
    before = serializers.DictField(allow_null=True, help_text="Null: the object was created.")
    after = serializers.DictField(allow_null=True, help_text="Null: the object was deleted.")

    class Meta:
        model = AuditEntry
        fields = (
            "id",
            "created_at",
            "action",
            "actor",
            "actor_user_id",
            "actor_key_id",
            "ip_address",
            "request_id",
            "object_type",
            "object_id",
            "object_name",
            "before",
            "after",
        )
        read_only_fields = fields


class AuditQuery(Query):
    names = {"since": "created_at__gte", "until": "created_at__lt"}  # noqa: RUF012
    action = serializers.CharField(required=False, max_length=64)
    actor = serializers.CharField(required=False, max_length=254)
    object_type = serializers.CharField(required=False, max_length=40)
    object_id = _id("ID of the object.", required=False)
    request_id = serializers.CharField(required=False, max_length=64)
    since = serializers.DateTimeField(required=False)
    until = serializers.DateTimeField(required=False)


# Operators


class TenantQuery(Query):
    names = {"search": "name__icontains"}  # noqa: RUF012
    status = serializers.ChoiceField(Tenant.Status.choices, required=False)
    slug = serializers.CharField(required=False, max_length=50)
    search = serializers.CharField(required=False, max_length=200, help_text="Part of the name.")


class ServedModelSerializer(serializers.Serializer[Any]):
    name = serializers.CharField()
    origin = serializers.CharField(help_text="Source of the weights.")
    workers = serializers.IntegerField(help_text="Number of replicas that serve the model.")


class WorkerSerializer(serializers.Serializer[Any]):
    """A replica, as reported by its last heartbeat."""

    id = serializers.CharField()
    model = serializers.CharField()
    state = serializers.CharField()
    running = serializers.IntegerField()
    waiting = serializers.IntegerField()
    free_blocks = serializers.IntegerField()
    total_blocks = serializers.IntegerField()
