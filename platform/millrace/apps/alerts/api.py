"""Management API of alert rules and their alerts, below /api/alert-rules and /api/rule-alerts."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import exceptions, serializers
from rest_framework.request import Request
from rest_framework.response import Response

from billing.currencies.amounts import MAX_BUDGET
from millrace.apps.alerts.actions import (
    DEFAULT_MIN_REQUESTS,
    DEFAULT_WINDOW,
    MAX_MIN_REQUESTS,
    do_acknowledge_rule_alert,
    do_change_alert_rule,
    do_create_alert_rule,
    do_remove_alert_rule,
)
from millrace.apps.alerts.checks import alerts_of
from millrace.apps.alerts.models import WINDOWS, AlertRule, RuleAlert
from tenants.api.idempotency import idempotent
from tenants.api.serializers import MAX_BIGINT, Query, StrictSerializer
from tenants.api.views import TenantView, check_query, person, validate_body
from tenants.models import Project
from tenants.permissions import Permission

WINDOW_CHOICES = [(minutes, f"{minutes} minutes") for minutes in WINDOWS]
_UNITS = (
    "error_rate: hundredths of a percent. ttft_p95: milliseconds. key_expiry: days. credit: nano-USD, or nano-units of"
    " the tenant's currency. replica_down, deployment_down and upstream_down: minutes."
)


class AlertRuleSerializer(serializers.ModelSerializer[AlertRule]):
    class Meta:
        model = AlertRule
        fields = (
            *("id", "metric", "threshold", "window_minutes", "min_requests", "project_id", "model", "muted_until"),
            *("active", "created_at"),
        )
        read_only_fields = fields


class _AlertRuleValues(StrictSerializer):
    threshold = serializers.IntegerField(min_value=0, max_value=MAX_BUDGET, help_text=_UNITS)
    window_minutes = serializers.ChoiceField(
        WINDOW_CHOICES, required=False, help_text=f"Of error_rate and ttft_p95; default: {DEFAULT_WINDOW}."
    )
    min_requests = serializers.IntegerField(
        min_value=1,
        max_value=MAX_MIN_REQUESTS,
        required=False,
        help_text=f"Fewer requests in the window trigger no alert; default: {DEFAULT_MIN_REQUESTS}.",
    )


class AlertRuleUpdateSerializer(_AlertRuleValues):
    muted_until = serializers.DateTimeField(
        required=False, allow_null=True, help_text="Until then, alerts are recorded and not sent."
    )


class AlertRuleCreateSerializer(_AlertRuleValues):
    """A condition that is checked every minute."""

    metric = serializers.ChoiceField(
        AlertRule.Metric.choices,
        help_text="Only operators can create rules for replica_down, deployment_down and upstream_down.",
    )
    project_id = serializers.IntegerField(
        min_value=1, max_value=MAX_BIGINT, required=False, help_text="Only requests or keys of this project."
    )
    model = serializers.CharField(
        max_length=128, required=False, help_text="Only requests for this model, or health of this deployment."
    )


class RuleAlertSerializer(serializers.ModelSerializer[RuleAlert]):
    """An alert. Its value, threshold and samples are of the time at which it was triggered."""

    metric = serializers.ChoiceField(AlertRule.Metric.choices, source="rule.metric")
    event_id = serializers.IntegerField(allow_null=True, help_text="Its webhook event, for 90 days.")

    class Meta:
        model = RuleAlert
        fields = (
            *("id", "rule_id", "metric", "summary", "value", "threshold", "samples", "is_muted", "event_id"),
            *("created_at", "resolved_at", "acknowledged_at", "acknowledged_by"),
        )
        read_only_fields = fields


class AlertRuleQuery(Query):
    metric = serializers.ChoiceField(AlertRule.Metric.choices, required=False)
    active = serializers.BooleanField(required=False)


class RuleAlertQuery(Query):
    names = {"rule": "rule_id"}  # noqa: RUF012
    rule = serializers.IntegerField(min_value=1, max_value=MAX_BIGINT, required=False, help_text="Only this rule's.")
    open = serializers.BooleanField(required=False, help_text="Only alerts that are not resolved, or only others.")

    def filters(self) -> dict[str, Any]:
        found = super().filters()
        if "open" in found:
            found["resolved_at__isnull"] = found.pop("open")
        return found


class AlertRuleView(TenantView):
    """A view that changes alert rules."""

    def require_operator(self, request: Request, metric: str) -> None:
        """Require an operator for a rule of the platform.

        Raises:
            PermissionDenied: the caller is not an operator.
        """
        user = person(request)
        if metric in AlertRule.OF_PLATFORM and not (user is not None and user.is_staff):
            raise exceptions.PermissionDenied("Only operators can change alert rules of the platform.")


@extend_schema(tags=["alerts"])
class AlertRules(AlertRuleView):
    permissions: ClassVar = {"GET": Permission.LIMITS_READ, "POST": Permission.LIMITS_WRITE}

    @extend_schema(operation_id="alert_rules", parameters=[AlertRuleQuery], responses=AlertRuleSerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return the alert rules, newest first."""
        query = check_query(AlertRuleQuery, request)
        with self.scope():
            return self.page(self.rows(AlertRule).filter(**query.filters()).order_by("-pk"), AlertRuleSerializer)

    @extend_schema(
        operation_id="alert_rules_create", request=AlertRuleCreateSerializer, responses={201: AlertRuleSerializer}
    )
    @idempotent
    def post(self, request: Request) -> Response:
        """Create an alert rule. Its alerts are sent by email and to the webhooks and channels of the tenant."""
        fields = validate_body(AlertRuleCreateSerializer, request.data)
        self.require_operator(request, fields["metric"])
        project_id, project = fields.pop("project_id", None), None
        if project_id is not None:
            with self.scope():
                project = self.rows(Project).filter(pk=project_id).first()
            if project is None:
                raise exceptions.ValidationError({"project_id": ["There is no such row."]})
        row = do_create_alert_rule(self.access.tenant, project=project, **fields)
        return Response(AlertRuleSerializer(row).data, status=201)


@extend_schema(tags=["alerts"])
class AlertRuleDetail(AlertRuleView):
    serializer_class = AlertRuleSerializer
    permissions: ClassVar = {
        "GET": Permission.LIMITS_READ,
        "PATCH": Permission.LIMITS_WRITE,
        "DELETE": Permission.LIMITS_WRITE,
    }

    @extend_schema(operation_id="alert_rule")
    def get(self, request: Request, pk: int) -> Response:
        """Return an alert rule."""
        return Response(AlertRuleSerializer(self.find(AlertRule, pk)).data)

    @extend_schema(operation_id="alert_rule_change", request=AlertRuleUpdateSerializer)
    def patch(self, request: Request, pk: int) -> Response:
        """Change or mute an alert rule."""
        row = self.find(AlertRule, pk)
        fields = validate_body(AlertRuleUpdateSerializer, request.data, partial=True)
        if set(fields) != {"muted_until"}:  # the tenant that receives the alerts can mute them
            self.require_operator(request, row.metric)
        return Response(AlertRuleSerializer(do_change_alert_rule(row, **fields)).data)

    @extend_schema(operation_id="alert_rule_remove", responses={204: None})
    def delete(self, request: Request, pk: int) -> Response:
        """Remove an alert rule. Its alerts are resolved and stay in the history."""
        row = self.find(AlertRule, pk)
        self.require_operator(request, row.metric)
        do_remove_alert_rule(row)
        return Response(status=204)


@extend_schema(tags=["alerts"])
class RuleAlerts(TenantView):
    permissions: ClassVar = {"GET": Permission.LIMITS_READ}

    @extend_schema(operation_id="rule_alerts", parameters=[RuleAlertQuery], responses=RuleAlertSerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return the alerts of alert rules, newest first."""
        query = check_query(RuleAlertQuery, request)
        with self.scope():
            return self.page(alerts_of(self.access.tenant.pk).filter(**query.filters()), RuleAlertSerializer)


@extend_schema(tags=["alerts"])
class RuleAlertAcknowledge(TenantView):
    permissions: ClassVar = {"POST": Permission.LIMITS_WRITE}

    @extend_schema(operation_id="rule_alert_acknowledge", request=None, responses=RuleAlertSerializer)
    def post(self, request: Request, pk: int) -> Response:
        """Acknowledge an alert. It has no effect if the alert was acknowledged before."""
        do_acknowledge_rule_alert(self.find(RuleAlert, pk))
        return Response(RuleAlertSerializer(self.find(RuleAlert, pk, "rule")).data)
