"""Forms about a tenant that lead back to the tenant's page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from django.http import HttpResponse
from django.utils.translation import gettext as _

from frontend.core.form_view import form_view
from frontend.core.layout import Breadcrumb
from frontend.core.page_context import PageContext
from tenants.models import Tenant

T = TypeVar("T")


def tenants_breadcrumb(ctx: PageContext) -> Breadcrumb:
    """Return the link to the list of tenants."""
    return Breadcrumb(_("Tenants"), ctx.url("operator-tenants"))


def tenant_form_view(
    ctx: PageContext,
    tenant: Tenant,
    title: str,
    form: Any,
    action: Callable[[dict[str, Any]], T],
    *,
    submit: str,
    message: Callable[[T], str],
    **context: Any,
) -> HttpResponse:
    """Return a form about the tenant that leads back to the tenant's page."""
    back = ctx.url("operator-tenants-detail", tenant.pk)
    breadcrumbs = (tenants_breadcrumb(ctx), Breadcrumb(tenant.name, back))
    return form_view(
        ctx, title, form, action, submit=submit, back=back, message=message, breadcrumbs=breadcrumbs, **context
    )
