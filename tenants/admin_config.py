"""Has Django's admin use our site (a module of its own: tenants.apps may hold one default configuration)."""

from __future__ import annotations

from django.contrib.admin.apps import AdminConfig


class RawAdminConfig(AdminConfig):
    """Django's admin below /operator/django-admin/."""

    default_site = "tenants.admin_site.RawAdminSite"
