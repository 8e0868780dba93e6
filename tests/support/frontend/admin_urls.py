"""The platform's URLs with Django's admin, as with MILLRACE_DJANGO_ADMIN."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

from millrace.conf.urls import urlpatterns as served

urlpatterns = [*served, path("operator/django-admin/", admin.site.urls)]  # with MILLRACE_DJANGO_ADMIN
