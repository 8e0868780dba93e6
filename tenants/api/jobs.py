"""Management API of jobs, below /api/jobs, and the response 202 of requests that start one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar
from urllib.parse import urlencode

from django.db.models import QuerySet
from django.http import HttpResponse
from django.urls import reverse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiResponse, extend_schema
from rest_framework import exceptions, serializers
from rest_framework.request import Request
from rest_framework.response import Response

from tenants.api.serializers import Query
from tenants.api.views import TenantView, check_query, find_first
from tenants.jobs import JobKind, TooManyJobs, do_start_job
from tenants.models import TenantJob
from tenants.permissions import Permission
from tenants.problems import StateConflict

RETRY_AFTER_SECONDS = 1


class TenantJobSerializer(serializers.ModelSerializer[TenantJob]):
    """A job and its state. When it is `completed`, `GET /api/jobs/{id}/result` returns its result."""

    error = serializers.CharField(help_text="Why it failed; empty: it did not.")

    class Meta:
        model = TenantJob
        fields = ("id", "kind", "parameters", "status", "created_at", "started_at", "ended_at", "error")
        read_only_fields = fields


ACCEPTED = {202: OpenApiResponse(TenantJobSerializer, "The job was stored. `Location` has its URL.")}


class JobQuery(Query):
    kind = serializers.CharField(required=False)
    status = serializers.ChoiceField(TenantJob.Status.choices, required=False)


def accept_job(
    view: TenantView, request: Request, kind: JobKind, parameters: Mapping[str, Any] | None = None
) -> Response:
    """Start a job of the view's tenant, and return the response 202 with the URL of its state.

    Raises:
        Throttled: too many jobs of the tenant are unfinished.
    """
    try:
        job = do_start_job(view.access.tenant, kind, parameters)
    except TooManyJobs as exc:
        raise exceptions.Throttled(wait=RETRY_AFTER_SECONDS, detail=str(exc)) from exc
    slug = request.query_params.get("tenant")
    query = f"?{urlencode({'tenant': slug})}" if slug else ""
    headers = {"Location": reverse("api-job", args=[job.pk]) + query, "Retry-After": str(RETRY_AFTER_SECONDS)}
    return Response(TenantJobSerializer(job).data, status=202, headers=headers)


class JobView(TenantView):
    """A view of the jobs that the caller may see."""

    serializer_class = TenantJobSerializer
    permissions: ClassVar = {"GET": Permission.TENANT_READ}

    def jobs(self) -> QuerySet[TenantJob]:
        """Return the jobs; the scope must be open."""
        return self.rows(TenantJob).filter(permission__in=[each.value for each in self.access.permissions])

    def find_job(self, pk: int, *left_out: str) -> TenantJob:
        """Return a job, without the fields that are left out.

        Raises:
            NotFound: the tenant has no such job, or the caller may not see it.
        """
        with self.scope():
            return find_first(self.jobs().defer(*left_out).filter(pk=pk))


class Jobs(JobView):
    @extend_schema(operation_id="jobs", parameters=[JobQuery], responses=TenantJobSerializer(many=True))
    def get(self, request: Request) -> Response:
        """List the jobs of the last day, newest first."""
        filters = check_query(JobQuery, request).filters()
        with self.scope():
            return self.page(self.jobs().filter(**filters).defer("result"), TenantJobSerializer)


class JobDetail(JobView):
    @extend_schema(operation_id="job", responses=TenantJobSerializer)
    def get(self, request: Request, pk: int) -> Response:
        """Return the state of a job."""
        return Response(TenantJobSerializer(self.find_job(pk, "result")).data)


class JobResultView(JobView):
    pagination_class = None

    @extend_schema(
        operation_id="job_result",
        responses={200: OpenApiResponse(OpenApiTypes.ANY, "The result, whose format depends on the job's kind.")},
    )
    def get(self, request: Request, pk: int) -> HttpResponse:
        """Return the result of a completed job."""
        job = self.find_job(pk)
        if job.status != TenantJob.Status.COMPLETED:
            raise StateConflict(f"The job has no result. Its status is {job.status}.")
        response = HttpResponse(job.result, content_type=job.content_type)
        if job.filename:
            response.headers["Content-Disposition"] = f'attachment; filename="{job.filename}"'
        return response
