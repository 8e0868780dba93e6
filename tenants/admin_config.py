"""The app configuration of Django's admin with RawAdminSite. tenants.apps can contain only one configuration."""

from __future__ import annotations

from django.contrib.admin.apps import AdminConfig


class RawAdminConfig(AdminConfig):
    """Django's admin below /operator/django-admin/."""

    default_site = "tenants.admin_site.RawAdminSite"
