"""Management API of experiments, below /api/experiments."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from millrace.apps.experiments import serializers as s
from millrace.apps.experiments.results import read_results
from tenants import actions
from tenants.api.idempotency import idempotent
from tenants.api.views import TenantView, check_query, person, validate_body
from tenants.models import Experiment
from tenants.permissions import Permission


class Experiments(TenantView):
    permissions: ClassVar = {"GET": Permission.POLICIES_READ, "POST": Permission.POLICIES_WRITE}

    @extend_schema(
        operation_id="experiments", parameters=[s.ExperimentQuery], responses=s.ExperimentSerializer(many=True)
    )
    def get(self, request: Request) -> Response:
        """Return all experiments, newest first."""
        query = check_query(s.ExperimentQuery, request)
        with self.scope():
            return self.page(self.rows(Experiment).filter(**query.filters()), s.ExperimentSerializer)

    @extend_schema(
        operation_id="experiments_create", request=s.ExperimentCreateSerializer, responses={201: s.ExperimentSerializer}
    )
    @idempotent
    def post(self, request: Request) -> Response:
        """Create an experiment as a draft."""
        fields = validate_body(s.ExperimentCreateSerializer, request.data)
        row = actions.do_create_experiment(self.access.tenant, **fields, created_by=person(request))
        return Response(s.ExperimentSerializer(row).data, status=201)


class ExperimentDetail(TenantView):
    serializer_class = s.ExperimentSerializer
    permissions: ClassVar = {"GET": Permission.POLICIES_READ, "DELETE": Permission.POLICIES_WRITE}

    @extend_schema(operation_id="experiment")
    def get(self, request: Request, pk: int) -> Response:
        """Return the experiment."""
        return Response(s.ExperimentSerializer(self.find(Experiment, pk)).data)

    @extend_schema(operation_id="experiment_delete", responses={204: None})
    def delete(self, request: Request, pk: int) -> Response:
        """Delete a draft."""
        actions.do_delete_experiment(self.find(Experiment, pk))
        return Response(status=204)


class ExperimentResultsView(TenantView):
    permissions: ClassVar = {"GET": Permission.POLICIES_READ}
    pagination_class = None

    @extend_schema(operation_id="experiment_results", responses=s.ExperimentResultsSerializer)
    def get(self, request: Request, pk: int) -> Response:
        """Return the results so far."""
        row = self.find(Experiment, pk)
        with self.scope():
            results = read_results(row, datetime.now(UTC))
        return Response(s.ExperimentResultsSerializer(results).data)


class ExperimentStart(TenantView):
    permissions: ClassVar = {"POST": Permission.POLICIES_WRITE}

    @extend_schema(operation_id="experiment_start", request=None, responses=s.ExperimentSerializer)
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Start a draft."""
        return Response(s.ExperimentSerializer(actions.do_start_experiment(self.find(Experiment, pk))).data)


class ExperimentStop(TenantView):
    permissions: ClassVar = {"POST": Permission.POLICIES_WRITE}

    @extend_schema(operation_id="experiment_stop", request=None, responses=s.ExperimentSerializer)
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Stop a running experiment. Its requests are routed as without it."""
        row = self.find(Experiment, pk)
        actions.do_stop_experiment(row)
        return Response(s.ExperimentSerializer(self.find(Experiment, pk)).data)
