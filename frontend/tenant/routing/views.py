"""Routing: the list of aliases, one version, the editor, and the actions publish, restore and unpublish."""

from __future__ import annotations

from typing import Any

from django import forms
from django.http import HttpResponse
from django.urls import path

from frontend.core.confirmation import Confirm
from frontend.core.form_view import bound_data, form_view
from frontend.core.layout import Breadcrumb
from frontend.core.page_context import FORM, PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import redirect_with_message, render_form_errors, render_page
from frontend.tenant.routing import checking, dry_runs, page, positions
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
    """The text of a policy. `base` is the version that was active when editing started."""

    name = forms.CharField(
        label="Alias",
        max_length=64,
        help_text="Value of `model` in your requests.",
        widget=forms.TextInput(attrs={"autocomplete": "off", "spellcheck": "false"}),
    )
    body = forms.CharField(
        label="Policy",
        strip=False,
        max_length=positions.MAX_LENGTH,
        widget=forms.Textarea(attrs={"rows": 20, "spellcheck": "false", "class": "mono", "wrap": "off"}),
    )
    base = forms.IntegerField(required=False, widget=forms.HiddenInput)


@tenant_page(Permission.POLICIES_READ)
def routing(ctx: PageContext) -> HttpResponse:
    return render_page(ctx, "routing/page.html", "Routing policy", panels=PANELS)


@tenant_page(Permission.POLICIES_READ)
def policy(ctx: PageContext) -> HttpResponse:
    row = _version(ctx, ctx.arguments["policy"])
    with ctx.scope():
        found = page.detail(ctx, row)
    return render_page(ctx, "routing/detail.html", row.name, breadcrumbs=_crumbs(ctx), **found)


@tenant_page(Permission.POLICIES_WRITE, methods=FORM)
def edit(ctx: PageContext) -> HttpResponse:
    """Show the editor. A submitted form is published, or only checked if `check` is set."""
    form = Editor(bound_data(ctx), initial=_initial(ctx))
    if ctx.request.method == "POST" and "check" not in ctx.request.POST and form.is_valid():
        try:
            made = checking.publish(ctx, **form.cleaned_data)
        except ActionRefused as exc:
            form.add_error(None, str(exc))
        else:
            message = f"Version {made.version} of {made.name} published. It is live within a second."
            return redirect_with_message(ctx, ctx.url("routing-detail", made.pk), message)
    typed = {name: form[name].value() or "" for name in ("name", "body")}
    with ctx.scope():
        checked = checking.check(ctx, typed["name"], typed["body"])
    context: dict[str, Any] = {"checked": checked, "breadcrumbs": _crumbs(ctx), "back": ctx.url("routing")}
    context |= {"check_url": ctx.url("routing-check"), "of_all": ctx.request.POST.get("of") == dry_runs.MAX_MODELS}
    title = f"Edit {typed['name']}" if typed["name"] else "New alias"
    if form.is_bound and form.errors:
        return render_form_errors(ctx, "routing/edit.html", title, form, **context)
    return render_page(ctx, "routing/edit.html", title, form=form, **context)


@tenant_page(Permission.POLICIES_WRITE, methods=("POST",))
def check(ctx: PageContext) -> HttpResponse:
    """Return the result of checking the text as typed so far."""
    post = ctx.request.POST
    with ctx.scope():
        checked = checking.check(ctx, post.get("name", ""), post.get("body", ""))
    return render_page(ctx, "routing/checked.html", "Check", checked=checked)


@tenant_page(Permission.POLICIES_WRITE, methods=FORM)
def revert(ctx: PageContext) -> HttpResponse:
    row = _version(ctx, ctx.arguments["policy"])
    return form_view(
        ctx,
        f"Restore version {row.version} of {row.name}",
        forms.Form(bound_data(ctx)),
        lambda _: actions.do_revert_policy(row, created_by=ctx.user),
        message=lambda made: f"Version {row.version} restored as version {made.version}.",
        effect=f"Requests for {row.name} use version {row.version} within a second. A new version is created.",
        **_sheet(ctx, "Restore"),
    )


@tenant_page(Permission.POLICIES_WRITE, methods=FORM)
def unpublish(ctx: PageContext) -> HttpResponse:
    row = _version(ctx, ctx.arguments["policy"])
    return form_view(
        ctx,
        f"Unpublish {row.name}",
        Confirm(row.name, bound_data(ctx)),
        lambda _: actions.do_withdraw_policy(ctx.tenant, row.name),
        message=lambda was: f"{row.name} was unpublished." if was else "Already unpublished.",
        effect=f"Requests for {row.name} receive 404 within a second, unless a model has this name. Its versions"
        " are kept and can be restored.",
        danger=True,
        **_sheet(ctx, "Unpublish"),
    )


def _initial(ctx: PageContext) -> dict[str, Any]:
    """Return the initial text of the editor: a version or an example."""
    text = ctx.query.get("from", "")
    if text.isascii() and text.isdigit() and len(text) < 19:
        row = _version(ctx, int(text))
        with ctx.scope():
            base = page.versions(ctx).filter(name=row.name, active=True).values_list("version", flat=True).first()
        return {"name": row.name, "body": positions.pretty(row.body), "base": base}
    models = checking.served()
    return {"name": "", "body": EXAMPLE.replace("MODEL", models[0] if models else "model")}


def _version(ctx: PageContext, pk: int) -> RoutingPolicy:
    return ctx.get(lambda: page.versions(ctx).filter(pk=pk))


def _crumbs(ctx: PageContext) -> tuple[Breadcrumb, ...]:
    return (Breadcrumb("Routing policy", ctx.url("routing")),)


def _sheet(ctx: PageContext, submit: str) -> dict[str, Any]:
    return {"submit": submit, "back": ctx.url("routing"), "breadcrumbs": _crumbs(ctx)}


_ROOT = "t/<slug:slug>/routing/"
urlpatterns = [
    path(_ROOT, routing, name="routing"),
    path(f"{_ROOT}edit", edit, name="routing-edit"),
    path(f"{_ROOT}check", check, name="routing-check"),
    path(f"{_ROOT}<int:policy>", policy, name="routing-detail"),
    path(f"{_ROOT}<int:policy>/revert", revert, name="routing-revert"),
    path(f"{_ROOT}<int:policy>/unpublish", unpublish, name="routing-unpublish"),
    PANELS.tenant_url(_ROOT, Permission.POLICIES_READ),
]
