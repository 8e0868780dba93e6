"""A page of one form, shown and carried out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from django import forms
from django.http import HttpResponse, QueryDict

from frontend.core.layout import Breadcrumb
from frontend.core.page_context import PageContext
from frontend.core.rendering import carry_out, done, refused, show

T = TypeVar("T")


def posted(visit: PageContext) -> QueryDict | None:
    """Return what was sent, for a form; None if it is only to be shown."""
    return visit.request.POST if visit.request.method == "POST" else None


def ask(
    visit: PageContext,
    title: str,
    form: forms.Form,
    verb: Callable[[dict[str, Any]], T],
    *,
    submit: str,
    back: str,
    said: Callable[[T], str],
    then: str = "",
    template: str = "frontend/form.html",
    breadcrumbs: Iterable[Breadcrumb] = (),
    **given: Any,
) -> HttpResponse:
    """Show the form. When it is sent and `verb` succeeds, redirect to `then` or `back` with the message of `said`.

    `given` goes to the template: `effect`, `danger`.
    """
    context = {"action": visit.request.path, "submit": submit, "back": back, "breadcrumbs": tuple(breadcrumbs), **given}
    if visit.request.method == "POST":
        if carried := carry_out(form, verb):
            return done(visit, then or back, said(carried.value))
        return refused(visit, template, title, form, **context)
    return show(visit, template, title, form=form, **context)
