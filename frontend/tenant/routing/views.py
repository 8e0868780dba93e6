"""Routing: the list of aliases, one version, the editor, and the actions publish, restore and unpublish."""

from __future__ import annotations

from typing import Any

from django import forms
from django.http import HttpResponse
from django.shortcuts import render
from django.urls import path
from django.utils.translation import gettext as _

from frontend.core.backend_messages import translate_message
from frontend.core.confirmation import Confirm
from frontend.core.form_view import bound_data, form_view
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.page_context import FORM, PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import redirect_with_message, render_form_errors, render_page
from frontend.core.screens import ConsoleScreen
from frontend.tenant.routing import checking, page, positions
from frontend.tenant.routing.editor import SubmittedEditor, open_editor, read_submitted
from millrace.apps.deployments.model_obstacles import example_model
from tenants import actions
from tenants.actions import ActionRefused
from tenants.models import RoutingPolicy, RoutingPolicyDraft
from tenants.permissions import Permission
from tenants.request_costs import PAGE_COST
from tenants.routing_policies.diffs import pretty

PANELS = Panels("routing-panel", (Panel("names", _lazy("Aliases"), "routing/page.html#names", page.names, every=0),))
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
        label=_lazy("Alias"),
        max_length=64,
        help_text=_lazy("Value of `model` in your requests."),
        widget=forms.TextInput(attrs={"autocomplete": "off", "spellcheck": "false"}),
    )
    body = forms.CharField(
        label=_lazy("Policy"),
        strip=False,
        max_length=positions.MAX_LENGTH,
        widget=forms.Textarea(attrs={"rows": 20, "spellcheck": "false", "class": "mono", "wrap": "off"}),
    )
    base = forms.IntegerField(required=False, widget=forms.HiddenInput)


@tenant_page(Permission.POLICIES_READ)
def routing(ctx: PageContext) -> HttpResponse:
    return render_page(ctx, "routing/page.html", _("Routing policy"), panels=PANELS)


@tenant_page(Permission.POLICIES_READ)
def policy(ctx: PageContext) -> HttpResponse:
    row = _version(ctx, ctx.arguments["policy"])
    with ctx.scope():
        found = page.detail(ctx, row)
        found["problems"] = checking.problems_of(ctx, row.body) if row.active else []
    return render_page(ctx, "routing/detail.html", row.name, breadcrumbs=_crumbs(ctx), **found)


@tenant_page(Permission.POLICIES_WRITE, methods=FORM, cost=PAGE_COST)
def edit(ctx: PageContext) -> HttpResponse:
    """Show the editor. A submitted form is published or saved as a draft, unless a check or a rule's button is used."""
    is_post = ctx.request.method == "POST"
    initial, draft = ({}, None) if is_post else _initial(ctx)
    submitted = read_submitted(ctx) if is_post else SubmittedEditor.from_text(initial["body"])
    data = bound_data(ctx)
    if data is not None:
        data = data.copy()
        data["body"] = submitted.text
    form = Editor(data, initial=initial)
    acts = is_post and not {"check", "op", "keep"} & set(ctx.request.POST) and not submitted.rules
    if acts and form.is_valid():
        given = form.cleaned_data
        try:
            if "draft" in ctx.request.POST:
                row = checking.save_draft(ctx, name=given["name"], body=given["body"])
                url = f"{ctx.url('routing-edit')}?draft={row.pk}"
                return redirect_with_message(
                    ctx, url, _("Draft of %(name)s saved. Requests do not use it.") % {"name": row.name}
                )
            made = checking.publish(ctx, **given)
        except ActionRefused as exc:
            form.add_error(None, translate_message(exc))
        else:
            message = _("Version %(version)s of %(name)s published. It is live within a second.") % {
                "version": made.version,
                "name": made.name,
            }
            return redirect_with_message(ctx, ctx.url("routing-detail", made.pk), message)
    name = form["name"].value() or ""
    context = _editor_context(ctx, name, submitted)
    if name and not is_post and draft is None and context["checked"].active is not None:
        form.initial["base"] = context["checked"].active.version
    context |= {"breadcrumbs": _crumbs(ctx), "back": ctx.url("routing"), "draft": draft}
    title = _("Edit %(name)s") % {"name": name} if name else _("New alias")
    if acts and form.errors:
        return render_form_errors(ctx, "routing/edit.html", title, form, **context)
    return render_page(ctx, "routing/edit.html", title, form=form, **context)


@tenant_page(Permission.POLICIES_WRITE, methods=("POST",), cost=PAGE_COST)
def check(ctx: PageContext) -> HttpResponse:
    """Return the result of checking the editor as typed so far, with its rules and its JSON."""
    post = ctx.request.POST
    submitted = read_submitted(ctx)
    context = _editor_context(ctx, post.get("name", ""), submitted)
    context["is_json_changed"] = submitted.text != post.get("body", "")
    return render(ctx.request, "routing/edit.html#check_result", {"ctx": ctx} | context)


def _editor_context(ctx: PageContext, name: str, submitted: SubmittedEditor) -> dict[str, Any]:
    with ctx.scope():
        checked = checking.check(ctx, name, submitted.text)
        active = None if checked.active is None else checked.active.body
        editor = open_editor(ctx, submitted, active)
    if checked.trial is not None and checked.trial.requests:
        for row in editor.rows:
            row.requests = checked.trial.rules.get(row.index, 0)
    return {"checked": checked, "editor": editor, "check_url": ctx.url("routing-check"), "of_all": checked.of_all}


@tenant_page(Permission.POLICIES_WRITE, methods=FORM)
def discard(ctx: PageContext) -> HttpResponse:
    row = ctx.get(lambda: page.drafts(ctx).filter(pk=ctx.arguments["draft"]))
    return form_view(
        ctx,
        _("Discard the draft of %(name)s") % {"name": row.name},
        forms.Form(bound_data(ctx)),
        lambda _: actions.do_discard_policy_draft(row),
        message=lambda _done: _("The draft of %(name)s was discarded.") % {"name": row.name},
        effect=_("The draft cannot be restored. Requests are not affected."),
        danger=True,
        **_sheet(ctx, _("Discard")),
    )


@tenant_page(Permission.POLICIES_WRITE, methods=FORM)
def revert(ctx: PageContext) -> HttpResponse:
    row = _version(ctx, ctx.arguments["policy"])
    return form_view(
        ctx,
        _("Restore version %(version)s of %(name)s") % {"version": row.version, "name": row.name},
        forms.Form(bound_data(ctx)),
        lambda _: actions.do_revert_policy(row, created_by=ctx.user),
        message=lambda made: (
            _("Version %(version)s restored as version %(new)s.") % {"version": row.version, "new": made.version}
        ),
        effect=_("Requests for %(name)s use version %(version)s within a second. A new version is created.")
        % {"name": row.name, "version": row.version},
        **_sheet(ctx, _("Restore")),
    )


@tenant_page(Permission.POLICIES_WRITE, methods=FORM)
def unpublish(ctx: PageContext) -> HttpResponse:
    row = _version(ctx, ctx.arguments["policy"])
    return form_view(
        ctx,
        _("Unpublish %(name)s") % {"name": row.name},
        Confirm(row.name, bound_data(ctx)),
        lambda _: actions.do_withdraw_policy(ctx.tenant, row.name),
        message=lambda was: _("%(name)s was unpublished.") % {"name": row.name} if was else _("Already unpublished."),
        effect=_(
            "Requests for %(name)s receive 404 within a second, unless a model has this name. Its versions are "
            "kept and can be restored."
        )
        % {"name": row.name},
        danger=True,
        **_sheet(ctx, _("Unpublish")),
    )


def _initial(ctx: PageContext) -> tuple[dict[str, Any], RoutingPolicyDraft | None]:
    """Return the initial text of the editor, and the draft that it is from: a draft, a version or an example."""
    text, draft = ctx.query.get("from", ""), ctx.query.get("draft", "")
    if _is_id(draft):
        row = ctx.get(lambda: page.drafts(ctx).filter(pk=int(draft)))
        return {"name": row.name, "body": pretty(row.body), "base": row.based_on}, row
    if _is_id(text):
        version = _version(ctx, int(text))
        return {"name": version.name, "body": pretty(version.body)}, None
    return {"name": "", "body": EXAMPLE.replace("MODEL", example_model(ctx.tenant.pk))}, None


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


def _version(ctx: PageContext, pk: int) -> RoutingPolicy:
    return ctx.get(lambda: page.versions(ctx).filter(pk=pk))


def _crumbs(ctx: PageContext) -> tuple[Breadcrumb, ...]:
    return (Breadcrumb(_("Routing policy"), ctx.url("routing")),)


def _sheet(ctx: PageContext, submit: str) -> dict[str, Any]:
    return {"submit": submit, "back": ctx.url("routing"), "breadcrumbs": _crumbs(ctx)}


_ROOT = "t/<slug:slug>/routing/"
SCREEN = ConsoleScreen(
    "routing",
    _lazy("Routing policy"),
    icon="routing",
    letter="r",
    group="build",
    order=40,
    needs=Permission.POLICIES_READ,
)
urlpatterns = [
    path(_ROOT, routing, name="routing"),
    path(f"{_ROOT}edit", edit, name="routing-edit"),
    path(f"{_ROOT}check", check, name="routing-check"),
    path(f"{_ROOT}drafts/<int:draft>/discard", discard, name="routing-discard"),
    path(f"{_ROOT}<int:policy>", policy, name="routing-detail"),
    path(f"{_ROOT}<int:policy>/revert", revert, name="routing-revert"),
    path(f"{_ROOT}<int:policy>/unpublish", unpublish, name="routing-unpublish"),
    PANELS.tenant_url(_ROOT, Permission.POLICIES_READ),
]
