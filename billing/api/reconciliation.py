"""The endpoint of reconciliation reports."""

from __future__ import annotations

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from billing.metering.reconciler import ReconciliationStatus, reconciliation_status
from billing.models import Reconciliation
from tenants.api.operators import OperatorView


class ReconciliationReportSerializer(serializers.ModelSerializer[Reconciliation]):
    """A comparison of budget periods, leases, events and workers' journals."""

    class Meta:
        model = Reconciliation
        fields = ("created_at", "budget_periods", "differences", "corrected", "overdue_leases")
        read_only_fields = fields


class ReconciliationStatusSerializer(serializers.Serializer[ReconciliationStatus]):
    is_clean = serializers.BooleanField(help_text="All agreed, lately, and nothing waits in quarantine.")
    is_late = serializers.BooleanField(help_text="No comparison for a quarter of an hour.")
    report = ReconciliationReportSerializer(allow_null=True, help_text="The newest; null before the first.")
    quarantine = serializers.DictField(
        child=serializers.IntegerField(), help_text="Unhandled usage messages in quarantine, by reason."
    )


class ReconciliationView(OperatorView):
    serializer_class = ReconciliationStatusSerializer

    @extend_schema(operation_id="operator_reconciliation")
    def get(self, request: Request) -> Response:
        """Return the last comparison of budget periods, leases, events and journals, what was repaired, and which usage
        could not be settled.
        """
        with self.scope():
            return Response(ReconciliationStatusSerializer(reconciliation_status()).data)
