"""Management API of the tenant, its projects and its audit log."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import transaction
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from tenants import actions
from tenants.api import serializers as s
from tenants.api.idempotency import idempotent
from tenants.api.views import TenantView, check_query, validate_body
from tenants.models import AuditEntry, Project, Tenant
from tenants.permissions import Permission


def representation(tenant: Tenant) -> dict[str, Any]:
    return dict(s.TenantSerializer(tenant).data)


class TenantDetail(TenantView):
    serializer_class = s.TenantSerializer
    permissions: ClassVar = {
        "GET": Permission.TENANT_READ,
        "PATCH": Permission.TENANT_UPDATE,
        "DELETE": Permission.TENANT_DELETE,
    }

    @extend_schema(operation_id="tenant", parameters=[s.Query])
    def get(self, request: Request) -> Response:
        """Return the tenant."""
        return Response(representation(self.access.tenant))

    @extend_schema(operation_id="tenant_update", request=s.TenantUpdateSerializer)
    def patch(self, request: Request) -> Response:
        """Change the tenant's name, retention of content, unknown parameters, allowed origins or answer cache."""
        fields = validate_body(s.TenantUpdateSerializer, request.data, partial=True)
        tenant = self.access.tenant
        with transaction.atomic():
            if "name" in fields:
                actions.do_update_tenant(tenant, name=fields.pop("name"))
            actions.do_update_settings(tenant, **fields)
        return Response(representation(self.find(Tenant, tenant.pk)))

    @extend_schema(operation_id="tenant_delete", responses={204: None})
    def delete(self, request: Request) -> Response:
        """Delete the tenant. It is not served from now on, and can be restored until `purge_after`."""
        actions.do_delete_tenant(self.access.tenant)
        return Response(status=204)


class TenantRestore(TenantView):
    permissions: ClassVar = {"POST": Permission.TENANT_DELETE}

    @extend_schema(operation_id="tenant_restore", request=None, responses=s.TenantSerializer)
    @idempotent
    def post(self, request: Request) -> Response:
        """Restore the deleted tenant."""
        actions.do_restore_tenant(self.access.tenant)
        return Response(representation(self.find(Tenant, self.access.tenant.pk)))


class Projects(TenantView):
    permissions: ClassVar = {"GET": Permission.PROJECTS_READ, "POST": Permission.PROJECTS_WRITE}

    @extend_schema(operation_id="projects", parameters=[s.ProjectQuery], responses=s.ProjectSerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return the tenant's projects, newest first."""
        query = check_query(s.ProjectQuery, request)
        with self.scope():
            return self.page(self.rows(Project).filter(**query.filters()), s.ProjectSerializer)

    @extend_schema(
        operation_id="projects_create", request=s.ProjectCreateSerializer, responses={201: s.ProjectSerializer}
    )
    @idempotent
    def post(self, request: Request) -> Response:
        """Create a project."""
        fields = validate_body(s.ProjectCreateSerializer, request.data)
        project = actions.do_create_project(self.access.tenant, fields.get("slug", ""), fields["name"])
        return Response(s.ProjectSerializer(project).data, status=201)


class ProjectDetail(TenantView):
    serializer_class = s.ProjectSerializer
    permissions: ClassVar = {
        "GET": Permission.PROJECTS_READ,
        "PATCH": Permission.PROJECTS_WRITE,
        "DELETE": Permission.PROJECTS_WRITE,
    }

    @extend_schema(operation_id="project")
    def get(self, request: Request, pk: int) -> Response:
        """Return the project."""
        return Response(s.ProjectSerializer(self.find(Project, pk)).data)

    @extend_schema(operation_id="project_update", request=s.NameUpdateSerializer)
    def patch(self, request: Request, pk: int) -> Response:
        """Change the project's name."""
        project = actions.do_update_project(
            self.find(Project, pk), **validate_body(s.NameUpdateSerializer, request.data)
        )
        return Response(s.ProjectSerializer(project).data)

    @extend_schema(operation_id="project_delete", responses={204: None})
    def delete(self, request: Request, pk: int) -> Response:
        """Delete a project. Projects that have or had API keys cannot be deleted."""
        actions.do_delete_project(self.find(Project, pk))
        return Response(status=204)


class Audit(TenantView):
    permissions: ClassVar = {"GET": Permission.AUDIT_READ}

    @extend_schema(operation_id="audit", parameters=[s.AuditQuery], responses=s.AuditEntrySerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return the entries of the audit log, newest first."""
        query = check_query(s.AuditQuery, request)
        with self.scope():
            return self.page(self.rows(AuditEntry).filter(**query.filters()), s.AuditEntrySerializer)


class AuditDetail(TenantView):
    serializer_class = s.AuditEntrySerializer
    permissions: ClassVar = {"GET": Permission.AUDIT_READ}

    @extend_schema(operation_id="audit_entry")
    def get(self, request: Request, pk: int) -> Response:
        """Return the audit entry."""
        return Response(s.AuditEntrySerializer(self.find(AuditEntry, pk)).data)
