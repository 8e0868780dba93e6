"""Responses of views: a page, a form with errors, or a redirect with a message."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from django import forms
from django.contrib import messages
from django.http import HttpResponse, HttpResponseRedirect
from django.shortcuts import render

from frontend.core.backend_messages import translate_message
from frontend.core.form_validation import require_confirmation
from frontend.core.layout import Breadcrumb, layout_for
from frontend.core.page_context import PageContext
from frontend.core.panels import Panels
from tenants.actions import ActionRefused

T = TypeVar("T")


def render_page(
    ctx: PageContext,
    template: str,
    title: str,
    *,
    panels: Panels | None = None,
    breadcrumbs: Iterable[Breadcrumb] = (),
    status: int = 200,
    **context: Any,
) -> HttpResponse:
    """Return the page; for a dialog or drawer, only its content.

    The template extends `base_template` and receives `ctx`, `layout`, `title`, `panels` and `context`. If it is a
    partial, such as "keys/page.html#secret", it is only the content, without `extends`. `breadcrumbs` are shown between
    the tenant and the title of the page.
    """
    base_template = "frontend/fragment.html" if ctx.is_fragment else "frontend/base.html"
    extra_context = {
        "base_template": base_template,
        "ctx": ctx,
        "title": title,
        "layout": layout_for(ctx, title, tuple(breadcrumbs)),
        "panels": panels.first_paint(ctx) if panels else {},
    }
    if "#" in template:
        template, context["content_template"] = "frontend/content.html", template
    return render(ctx.request, template, extra_context | context, status=status)


@dataclass(frozen=True)
class ActionResult(Generic[T]):
    """The value that a successful action returned."""

    value: T


def run_action(form: forms.Form, action: Callable[[dict[str, Any]], T]) -> ActionResult[T] | None:
    """Return the result of the action for the form's clean data; None if the form is invalid or the action was
    rejected.

    A rejection becomes an error of the form. The action opens its own scope and writes the audit entry.

    Raises:
        ConfirmationRequired: the form is valid, and its user must re-authenticate first.
    """
    if not form.is_valid():
        return None
    require_confirmation()
    try:
        return ActionResult(action(form.cleaned_data))
    except ActionRefused as exc:
        form.add_error(None, translate_message(exc))
        return None


def render_form_errors(ctx: PageContext, template: str, title: str, form: forms.Form, **context: Any) -> HttpResponse:
    """Return the form with its errors and status 422."""
    return render_page(ctx, template, title, status=422, form=form, **context)


def redirect_with_message(ctx: PageContext, url: str, message: str, *, failed: bool = False) -> HttpResponse:
    """Redirect to `url`, where `message` is shown once. `failed`: it is an error."""
    require_confirmation()
    (messages.error if failed else messages.success)(ctx.request, message)
    if ctx.is_fragment:
        return HttpResponse(headers={"HX-Redirect": url})
    response = HttpResponseRedirect(url)
    response.status_code = 303
    return response
