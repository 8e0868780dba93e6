"""Routing: names, one version of one, the editor with its checks, publish, revert, withdraw."""

from __future__ import annotations

from typing import Any

from django import forms
from django.http import Http404, HttpResponse
from django.urls import path

from frontend.core.confirmation import Confirm
from frontend.core.form_view import ask, posted
from frontend.core.layout import Breadcrumb
from frontend.core.page_context import FORM, PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import done, refused, show
from frontend.tenant.routing import checking, dry_runs, page, places
from tenants import actions
from tenants.actions import ActionRefused
from tenants.models import RoutingPolicy
from tenants.permissions import Permission

PANELS = Panels("routing-panel", (Panel("names", "Aliases", "routing/names.html", page.names, every=0),))
EXAMPLE = """{
  "rules": [
    {
      "when": {"prompt_tokens": {"at_least": 2000}},
      "targets": [{"model": "MODEL"}]
    },
    {
      "targets": [{"model": "MODEL"}]
    }
  ],
  "fallback_on": ["error", "overload", "context"]
}"""


class Editor(forms.Form):
    """A policy as it is written. `base`: the version that was active when one began."""

    name = forms.CharField(
        label="Alias",
        max_length=64,
        help_text="Value of `model` in your requests.",
        widget=forms.TextInput(attrs={"autocomplete": "off", "spellcheck": "false"}),
    )
    body = forms.CharField(
        label="Policy",
        strip=False,
        max_length=places.LONGEST,
        widget=forms.Textarea(attrs={"rows": 20, "spellcheck": "false", "class": "mono", "wrap": "off"}),
    )
    base = forms.IntegerField(required=False, widget=forms.HiddenInput)


@tenant_page(Permission.POLICIES_READ)
def routing(visit: PageContext) -> HttpResponse:
    new_url = visit.url("routing-edit") if visit.may(Permission.POLICIES_WRITE) else ""
    return show(visit, "routing/page.html", "Routing policy", panels=PANELS, new_url=new_url)


@tenant_page(Permission.POLICIES_READ)
def one(visit: PageContext) -> HttpResponse:
    row = _version(visit, visit.arguments["policy"])
    with visit.scope():
        found = page.one(visit, row)
    return show(visit, "routing/detail.html", found.name, breadcrumbs=_crumbs(visit), one=found)


@tenant_page(Permission.POLICIES_WRITE, methods=FORM)
def edit(visit: PageContext) -> HttpResponse:
    """Return the editor. What is sent is published, or, with `check`, only looked at."""
    form = Editor(posted(visit), initial=_initial(visit))
    if visit.request.method == "POST" and "check" not in visit.request.POST and form.is_valid():
        try:
            made = checking.publish(visit, **form.cleaned_data)
        except ActionRefused as exc:
            form.add_error(None, str(exc))
        else:
            said = f"Version {made.version} of {made.name} published. It is live within a second."
            return done(visit, visit.url("routing-detail", made.pk), said)
    typed = {name: form[name].value() or "" for name in ("name", "body")}
    with visit.scope():
        checked = checking.check(visit, typed["name"], typed["body"])
    given: dict[str, Any] = {"checked": checked, "breadcrumbs": _crumbs(visit), "back": visit.url("routing")}
    given |= {"check_url": visit.url("routing-check"), "of_all": visit.request.POST.get("of") == dry_runs.ALL}
    title = f"Edit {typed['name']}" if typed["name"] else "New alias"
    if form.is_bound and form.errors:
        return refused(visit, "routing/edit.html", title, form, **given)
    return show(visit, "routing/edit.html", title, form=form, **given)


@tenant_page(Permission.POLICIES_WRITE, methods=("POST",))
def check(visit: PageContext) -> HttpResponse:
    """Return what is to be said of the text as it is typed."""
    post = visit.request.POST
    with visit.scope():
        checked = checking.check(visit, post.get("name", ""), post.get("body", ""))
    return show(visit, "routing/checked.html", "Check", checked=checked)


@tenant_page(Permission.POLICIES_WRITE, methods=FORM)
def revert(visit: PageContext) -> HttpResponse:
    row = _version(visit, visit.arguments["policy"])
    return ask(
        visit,
        f"Restore version {row.version} of {row.name}",
        forms.Form(posted(visit)),
        lambda _: actions.do_revert_policy(row, created_by=visit.user),
        said=lambda made: f"Version {row.version} restored as version {made.version}.",
        effect=f"Requests for {row.name} use version {row.version} within a second. A new version is created.",
        **_sheet(visit, "Restore"),
    )


@tenant_page(Permission.POLICIES_WRITE, methods=FORM)
def withdraw(visit: PageContext) -> HttpResponse:
    row = _version(visit, visit.arguments["policy"])
    return ask(
        visit,
        f"Unpublish {row.name}",
        Confirm(row.name, posted(visit)),
        lambda _: actions.do_withdraw_policy(visit.tenant, row.name),
        said=lambda was: f"{row.name} was unpublished." if was else "Already unpublished.",
        effect=f"Requests for {row.name} receive 404 within a second, unless a model has this name. Its versions"
        " are kept and can be restored.",
        danger=True,
        **_sheet(visit, "Unpublish"),
    )


def _initial(visit: PageContext) -> dict[str, Any]:
    """Return what the editor begins with: a version, or an example."""
    asked = visit.query.get("from", "")
    if asked.isascii() and asked.isdigit() and len(asked) < 19:
        row = _version(visit, int(asked))
        with visit.scope():
            base = page.versions(visit).filter(name=row.name, active=True).values_list("version", flat=True).first()
        return {"name": row.name, "body": places.pretty(row.body), "base": base}
    models = checking.served()
    return {"name": "", "body": EXAMPLE.replace("MODEL", models[0] if models else "model")}


def _version(visit: PageContext, pk: int) -> RoutingPolicy:
    with visit.scope():
        row = page.versions(visit).filter(pk=pk).first()
    if row is None:
        raise Http404
    return row


def _crumbs(visit: PageContext) -> tuple[Breadcrumb, ...]:
    return (Breadcrumb("Routing policy", visit.url("routing")),)


def _sheet(visit: PageContext, submit: str) -> dict[str, Any]:
    return {"submit": submit, "back": visit.url("routing"), "breadcrumbs": _crumbs(visit)}


_ROOT = "t/<slug:slug>/routing/"
urlpatterns = [
    path(_ROOT, routing, name="routing"),
    path(f"{_ROOT}edit", edit, name="routing-edit"),
    path(f"{_ROOT}check", check, name="routing-check"),
    path(f"{_ROOT}<int:policy>", one, name="routing-detail"),
    path(f"{_ROOT}<int:policy>/revert", revert, name="routing-revert"),
    path(f"{_ROOT}<int:policy>/withdraw", withdraw, name="routing-withdraw"),
    PANELS.tenant_url(_ROOT, Permission.POLICIES_READ),
]
