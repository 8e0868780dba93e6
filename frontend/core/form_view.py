"""Views that show and process one form."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from django import forms
from django.http import HttpResponse, QueryDict

from frontend.core.layout import Breadcrumb
from frontend.core.page_context import PageContext
from frontend.core.rendering import redirect_with_message, render_form_errors, render_page, run_action

T = TypeVar("T")


def bound_data(ctx: PageContext) -> QueryDict | None:
    """Return the submitted data of a form; None for a GET request."""
    return ctx.request.POST if ctx.request.method == "POST" else None


def form_view(
    ctx: PageContext,
    title: str,
    form: forms.Form,
    action: Callable[[dict[str, Any]], T],
    *,
    submit: str,
    back: str,
    message: Callable[[T], str],
    then: str | Callable[[T], str] = "",
    template: str = "frontend/form.html",
    breadcrumbs: Iterable[Breadcrumb] = (),
    action_url: str = "",
    **extra_context: Any,
) -> HttpResponse:
    """Show the form. When it is submitted and `action` succeeds, redirect to `then` or `back` with `message` of its
    result, of which `then` may be a function too.

    The template receives `extra_context`, such as `effect` and `danger`.
    """
    context = {
        "action": action_url or ctx.request.path,
        "submit": submit,
        "back": back,
        "breadcrumbs": tuple(breadcrumbs),
        **extra_context,
    }
    if ctx.request.method == "POST":
        if result := run_action(form, action):
            url = then(result.value) if callable(then) else then or back
            return redirect_with_message(ctx, url, message(result.value))
        return render_form_errors(ctx, template, title, form, **context)
    return render_page(ctx, template, title, form=form, **context)
