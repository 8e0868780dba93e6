"""URLs of the console and the management API. millrace.gateway.routes has those of /v1 and the health endpoints."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path
from django.views.generic import RedirectView
from drf_spectacular.views import SpectacularSwaggerSplitView

from millrace.conf.openapi_view import ManagementSchemaView
from millrace.environment.configuration import platform_settings

urlpatterns = [
    path("", include("frontend.urls")),
    path("api/", RedirectView.as_view(pattern_name="docs"), name="api"),
    path("api/", include("tenants.api.urls")),
    path("api/", include("billing.api.urls")),
    path("api/", include("millrace.apps.policy_results.urls")),
    path("api/", include("millrace.apps.answer_caches.urls")),
    path("api/", include("millrace.apps.request_log.urls")),
    path("api/", include("millrace.apps.experiments.urls")),
    path("api/", include("millrace.apps.deployments.urls")),
    path("api/", include("millrace.apps.alerts.urls")),
    path("api/schema/", ManagementSchemaView.as_view(), name="schema"),
    path(
        "api/docs/",
        SpectacularSwaggerSplitView.as_view(url_name="schema", template_name="frontend/docs.html"),
        name="docs",
    ),
]
if platform_settings().django_admin:
    urlpatterns.append(path("operator/django-admin/", admin.site.urls))
handler403 = "frontend.core.error_pages.permission_denied"
handler404 = "frontend.core.unknown_urls.not_found"
handler500 = "tenants.problems.server_error"
