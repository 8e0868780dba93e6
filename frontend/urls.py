"""The console's addresses."""

from __future__ import annotations

from django.contrib.auth.views import LogoutView
from django.urls import path

from frontend import views

urlpatterns = [
    path("", views.home, name="home"),
    path("login", views.LogIn.as_view(), name="login"),
    path("logout", LogoutView.as_view(), name="logout"),
    path("t/<slug:slug>/", views.tenant_overview, name="overview"),
    path("ops/", views.operator_tenants, name="operator-tenants"),
]
