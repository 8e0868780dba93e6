"""Drafts of routing policies, their validation and differences."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from tenants import actions
from tenants.actions.policy_drafts import MAX_BODY_LENGTH
from tenants.api.idempotency import idempotent
from tenants.api.serializers import MAX_BIGINT, PolicyCreateSerializer, PolicySerializer, Query, StrictSerializer
from tenants.api.target_problems import TargetProblemSerializer, WithProblems
from tenants.api.views import TenantView, check_query, person, validate_body
from tenants.models import RoutingPolicy, RoutingPolicyDraft
from tenants.permissions import Permission
from tenants.routing_policies import policy
from tenants.routing_policies.diffs import diff, pretty
from tenants.routing_policies.target_checks import TargetChecks

DIFF_CHANGES = (("+", "added"), ("-", "removed"), (" ", "unchanged"))


class PolicyDraftSerializer(WithProblems, serializers.ModelSerializer[RoutingPolicyDraft]):
    body = serializers.DictField()
    error = serializers.SerializerMethodField(help_text="Why the draft is not a valid policy; empty: it is valid.")
    problems = serializers.SerializerMethodField(help_text="Models that cannot serve requests.")

    class Meta:
        model = RoutingPolicyDraft
        fields = ("id", "name", "body", "based_on", "error", "problems", "updated_at")
        read_only_fields = fields

    def get_error(self, draft: RoutingPolicyDraft) -> str:
        return policy_error(draft.body)

    @extend_schema_field(TargetProblemSerializer(many=True))
    def get_problems(self, draft: RoutingPolicyDraft) -> list[dict[str, Any]]:
        return self.problem_fields(self.target_checks(draft.tenant_id).of_policy(draft.body))


class PolicyDraftQuery(Query):
    name = serializers.CharField(required=False, max_length=64)


class PolicyValidationCreateSerializer(StrictSerializer):
    body = serializers.DictField()


class PolicyValidationSerializer(serializers.Serializer[Any]):
    valid = serializers.BooleanField(help_text="Whether the policy can be published now.")
    error = serializers.CharField(help_text="The first error, with its path; empty: the policy is valid.")
    problems = TargetProblemSerializer(many=True, help_text="Models that cannot serve requests now.")
    models = serializers.ListField(child=serializers.CharField(), help_text="The models of all rules.")


class PolicyDiffQuery(Query):
    against = serializers.IntegerField(
        required=False,
        min_value=1,
        max_value=MAX_BIGINT,
        help_text="ID of the older version; default: the previous one.",
    )


class PolicyDiffLineSerializer(serializers.Serializer[Any]):
    change = serializers.ChoiceField(DIFF_CHANGES, help_text="Whether the line was added or removed.")
    text = serializers.CharField()


class PolicyDiffSerializer(serializers.Serializer[Any]):
    name = serializers.CharField()
    version = serializers.IntegerField()
    against = serializers.IntegerField(allow_null=True, help_text="The older version; null: there is none.")
    lines = PolicyDiffLineSerializer(many=True, help_text="All lines of both texts; empty if they are equal.")


@extend_schema(tags=["policies"])
class PolicyDrafts(TenantView):
    permissions: ClassVar = {"GET": Permission.POLICIES_READ, "POST": Permission.POLICIES_WRITE}

    @extend_schema(
        operation_id="policy_drafts", parameters=[PolicyDraftQuery], responses=PolicyDraftSerializer(many=True)
    )
    def get(self, request: Request) -> Response:
        """Return the drafts of routing policies, newest first."""
        query = check_query(PolicyDraftQuery, request)
        with self.scope():
            return self.page(self.rows(RoutingPolicyDraft).filter(**query.filters()), PolicyDraftSerializer)

    @extend_schema(
        operation_id="policy_drafts_save", request=PolicyCreateSerializer, responses={200: PolicyDraftSerializer}
    )
    @idempotent
    def post(self, request: Request) -> Response:
        """Save the draft of a routing policy, in place of an earlier one. Requests do not use it."""
        fields = validate_body(PolicyCreateSerializer, request.data)
        row = actions.do_save_policy_draft(self.access.tenant, **fields, updated_by=person(request))
        return Response(PolicyDraftSerializer(row).data)


@extend_schema(tags=["policies"])
class PolicyDraftDetail(TenantView):
    serializer_class = PolicyDraftSerializer
    permissions: ClassVar = {"GET": Permission.POLICIES_READ, "DELETE": Permission.POLICIES_WRITE}

    @extend_schema(operation_id="policy_draft")
    def get(self, request: Request, pk: int) -> Response:
        """Return the policy draft."""
        return Response(PolicyDraftSerializer(self.find(RoutingPolicyDraft, pk)).data)

    @extend_schema(operation_id="policy_draft_discard", responses={204: None})
    def delete(self, request: Request, pk: int) -> Response:
        """Discard the draft."""
        actions.do_discard_policy_draft(self.find(RoutingPolicyDraft, pk))
        return Response(status=204)


@extend_schema(tags=["policies"])
class PolicyDraftPublish(TenantView):
    permissions: ClassVar = {"POST": Permission.POLICIES_WRITE}

    @extend_schema(operation_id="policy_draft_publish", request=None, responses={201: PolicySerializer})
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Publish the draft as the newest version, unless another version was published since it was created."""
        row = actions.do_publish_policy_draft(self.find(RoutingPolicyDraft, pk), created_by=person(request))
        return Response(PolicySerializer(row).data, status=201)


class PolicyValidation(TenantView):
    permissions: ClassVar = {"POST": Permission.POLICIES_READ}

    @extend_schema(
        operation_id="policy_validate", request=PolicyValidationCreateSerializer, responses=PolicyValidationSerializer
    )
    def post(self, request: Request) -> Response:
        """Validate the body of a routing policy. Nothing is stored."""
        body = bounded_body(validate_body(PolicyValidationCreateSerializer, request.data)["body"])
        error = policy_error(body)
        models = [] if error else list(policy.parse(body).models)
        problems = TargetChecks(self.access.tenant.pk, with_replicas=True).of_policy(body)
        blocking = next((each.text for each in problems if each.is_blocking), "")
        found = {"valid": not (error or blocking), "error": error or blocking, "problems": problems, "models": models}
        return Response(PolicyValidationSerializer(found).data)


class PolicyDiff(TenantView):
    permissions: ClassVar = {"GET": Permission.POLICIES_READ}

    @extend_schema(operation_id="policy_diff", parameters=[PolicyDiffQuery], responses=PolicyDiffSerializer)
    def get(self, request: Request, pk: int) -> Response:
        """Return the differences between this version and an older one, as lines of their JSON."""
        row = self.find(RoutingPolicy, pk)
        against = check_query(PolicyDiffQuery, request).validated_data.get("against")
        if against is not None:
            older: RoutingPolicy | None = self.find(RoutingPolicy, against)
        else:
            with self.scope():
                rows = self.rows(RoutingPolicy).filter(name=row.name, version__lt=row.version)
                older = rows.order_by("-version").first()
        lines = diff("" if older is None else pretty(older.body), pretty(row.body))
        found = {
            "name": row.name,
            "version": row.version,
            "against": None if older is None else older.version,
            "lines": [{"change": change, "text": text} for change, text in lines],
        }
        return Response(PolicyDiffSerializer(found).data)


def bounded_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a policy.

    Raises:
        ValidationError: it is too long.
    """
    if len(json.dumps(body)) > MAX_BODY_LENGTH:
        raise ValidationError({"body": [f"A policy may have at most {MAX_BODY_LENGTH:,} characters."]})
    return body


def policy_error(body: dict[str, Any]) -> str:
    """Return why a body is not a valid policy; empty if it is."""
    try:
        policy.parse(body)
    except ValueError as exc:
        return str(exc)
    return ""
