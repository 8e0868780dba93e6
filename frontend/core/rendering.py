"""What views end with: a page in its frame, a form's verb carried out, a redirect with a word about what was done."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from django import forms
from django.contrib import messages
from django.http import HttpResponse, HttpResponseRedirect
from django.shortcuts import render

from frontend.core.layout import Breadcrumb, shell_for
from frontend.core.page_context import PageContext
from frontend.core.panels import Panels
from tenants.actions import ActionRefused

T = TypeVar("T")


def show(
    visit: PageContext,
    template: str,
    title: str,
    *,
    panels: Panels | None = None,
    breadcrumbs: Iterable[Breadcrumb] = (),
    status: int = 200,
    **context: Any,
) -> HttpResponse:
    """Return the page, or, for a dialog or drawer that asks, only its inside.

    The template extends `layout` and finds `visit`, `shell`, `title`, and by name what else is given.
    `breadcrumbs` stand between the tenant and the page's title.
    """
    layout = "frontend/fragment.html" if visit.is_fragment else "frontend/base.html"
    given = {
        "layout": layout,
        "visit": visit,
        "title": title,
        "shell": shell_for(visit, title, tuple(breadcrumbs)),
        "panels": panels.first_paint(visit) if panels else {},
    }
    return render(visit.request, template, given | context, status=status)


@dataclass(frozen=True)
class Carried(Generic[T]):
    """A verb was carried out, and gave `value`."""

    value: T


def carry_out(form: forms.Form, verb: Callable[[dict[str, Any]], T]) -> Carried[T] | None:
    """Return what the verb gives for the form's clean data; None if the form, or the verb, refuses, which the form
    then says.

    The verb opens the scope it needs, and writes the audit row.
    """
    if not form.is_valid():
        return None
    try:
        return Carried(verb(form.cleaned_data))
    except ActionRefused as exc:
        form.add_error(None, str(exc))
        return None


def refused(visit: PageContext, template: str, title: str, form: forms.Form, **context: Any) -> HttpResponse:
    """Return the form again, with what is wrong with it."""
    return show(visit, template, title, status=422, form=form, **context)


def done(visit: PageContext, url: str, said: str) -> HttpResponse:
    """On to `url`, where `said` is shown once."""
    messages.success(visit.request, said)
    if visit.is_fragment:
        return HttpResponse(headers={"HX-Redirect": url})
    response = HttpResponseRedirect(url)
    response.status_code = 303
    return response
