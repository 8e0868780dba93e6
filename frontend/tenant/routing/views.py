"""Routing: the list of aliases, one version, the editor, and the actions publish, restore and unpublish."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from django import forms
from django.http import HttpResponse, JsonResponse
from django.shortcuts import render
from django.urls import path
from django.utils.translation import gettext as _

from frontend.core.backend_messages import translate_message
from frontend.core.form_view import bound_data, form_view
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.page_context import FORM, PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import redirect_with_message, render_page
from frontend.core.screens import ConsoleScreen
from frontend.tenant.routing import changes, checking, editor, page, positions
from frontend.tenant.routing.positions import PolicyError
from tenants import actions
from tenants.actions import ActionRefused, VersionConflict
from tenants.models import RoutingPolicy, RoutingPolicyDraft
from tenants.permissions import Permission
from tenants.request_costs import PAGE_COST
from tenants.routing_policies.diffs import pretty

PANELS = Panels("routing-panel", (Panel("names", _lazy("Aliases"), "routing/page.html#names", page.names, every=0),))
MAX_VERSION = 2**31 - 1  # the largest number of a policy version
_CHOICES = {
    "strategies": editor.STRATEGY_NAMES,
    "answer_checks": editor.ANSWER_CHECKS,
    "fallbacks": editor.FALLBACKS,
}
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
    """The text of a policy. `base` is the version that was active when editing started; 0: none.

    In the sheet of a conflict, `base` is the live version that it shows, and `edited_from` that of before.
    """

    name = forms.CharField(
        label=_lazy("Alias"),
        max_length=64,
        help_text=_lazy("Value of `model` in your requests."),
        widget=forms.TextInput(attrs={"autocomplete": "off", "spellcheck": "false", "form": "policy-form"}),
    )
    body = forms.CharField(
        label=_lazy("Policy"),
        strip=False,
        max_length=positions.MAX_LENGTH,
        widget=forms.Textarea(
            attrs={"rows": 24, "spellcheck": "false", "class": "mono", "wrap": "off", "form": "policy-form"}
        ),
    )
    base = forms.IntegerField(required=False, min_value=0, max_value=MAX_VERSION, widget=forms.HiddenInput)


class ConflictForm(forms.Form):
    """The versions that the sheet of a conflict compares, beside the policy as edited."""

    base = forms.IntegerField(min_value=0, max_value=MAX_VERSION)
    edited_from = forms.IntegerField(min_value=0, max_value=MAX_VERSION)


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
    """Show the editor. A submitted policy is saved as a draft, published, or compared with the live version."""
    if ctx.request.method == "POST":
        return _submit(ctx)
    initial, draft = _initial(ctx)
    name, text = initial["name"], initial["body"]
    with ctx.scope():
        targets = checking.target_checks(ctx)
        builder = editor.builder_data(ctx, targets, text)
        if text == EXAMPLE:
            text = initial["body"] = text.replace("MODEL", builder["example"])
        checked = checking.check(ctx, name, text, targets)
    if draft is None:
        initial["base"] = checked.active.version if checked.active else 0
    return render_page(
        ctx,
        "routing/edit.html",
        _("Edit %(name)s") % {"name": name} if name else _("New alias"),
        form=Editor(initial=initial),
        draft=draft,
        checked=checked,
        marks=editor.check_marks(ctx, checked, text),
        builder=builder,
        breadcrumbs=_crumbs(ctx),
        back=ctx.url("routing"),
        check_url=ctx.url("routing-check"),
        choices=_CHOICES,
    )


@tenant_page(Permission.POLICIES_WRITE, methods=("POST",), cost=PAGE_COST)
def check(ctx: PageContext) -> HttpResponse:
    """Return the result of checking the policy as typed so far."""
    text = ctx.request.POST.get("body", "")
    with ctx.scope():
        checked = checking.check(ctx, ctx.request.POST.get("name", ""), text)
    context = {"ctx": ctx, "checked": checked, "marks": editor.check_marks(ctx, checked, text)}
    return render(ctx.request, "routing/edit.html#checked", context)


def _submit(ctx: PageContext) -> HttpResponse:
    """Save or publish a submitted policy. Otherwise, and if that is refused, return the sheet of its changes."""
    post = ctx.request.POST
    form = Editor(post)
    if "merge" in post:
        return _merge(ctx, form)
    if form.is_valid() and {"draft", "publish"} & set(post):
        given = form.cleaned_data
        try:
            if "draft" in post:
                row = checking.save_draft(ctx, **given)
                message = _("Draft of %(name)s saved. Requests do not use it.") % {"name": row.name}
                return redirect_with_message(ctx, f"{ctx.url('routing-edit')}?draft={row.pk}", message)
            made = checking.publish(ctx, **given)
        except VersionConflict:
            pass  # the sheet compares the versions
        except ActionRefused as exc:
            form.add_error(None, translate_message(exc))
        else:
            message = _("Version %(version)s of %(name)s published. It is live within a second.") % {
                "version": made.version,
                "name": made.name,
            }
            return redirect_with_message(ctx, ctx.url("routing-detail", made.pk), message)
    return _sheet_of_changes(ctx, form)


def _merge(ctx: PageContext, form: Editor) -> HttpResponse:
    """Return the policy with the versions of rules that the user chose: to the builder, or as the sheet of its changes.

    If another version was published since, the choice is of no use, and the sheet compares the newest one.
    """
    post = ctx.request.POST
    compared = ConflictForm(post)
    if not form.is_valid() or not compared.is_valid():
        return _sheet_of_changes(ctx, form)
    shown, edited_from = compared.cleaned_data["base"], compared.cleaned_data["edited_from"]
    name, found = form.cleaned_data["name"], positions.read(form.cleaned_data["body"])
    if isinstance(found, PolicyError):
        return _sheet_of_changes(ctx, form)
    with ctx.scope():
        rows = page.versions(ctx).filter(name=name)
        active, older = rows.filter(active=True).first(), rows.filter(version=edited_from).first()
    again = Editor({**post.dict(), "base": edited_from})
    if active is None or active.version != shown:
        return _sheet_of_changes(ctx, again)
    try:
        text = changes.merge_chosen(None if older is None else older.body, active, found[0], post.dict())
    except ValueError as exc:
        again.add_error(None, translate_message(exc))
        return _sheet_of_changes(ctx, again)
    if ctx.is_fragment:
        return JsonResponse({"body": text, "base": active.version})
    return _sheet_of_changes(ctx, Editor({**post.dict(), "body": text, "base": active.version}))


def _sheet_of_changes(ctx: PageContext, form: Editor) -> HttpResponse:
    """Return the sheet of a submitted policy: its changes in words, its dry run, and what prevents its publication.

    If another version than its base is live, the status is 409, and the sheet shows the difference of the three.
    """
    status = HTTPStatus.OK if form.is_valid() else HTTPStatus.UNPROCESSABLE_ENTITY
    name, text = (form.data.get(field, "") for field in ("name", "body"))
    base = form.cleaned_data.get("base")
    name_error = " ".join(map(str, form.errors.get("name", ())))
    with ctx.scope():
        checked = checking.check(ctx, name, text)
        context: dict[str, Any] = {"checked": checked, "headline": changes.headline(checked)}
        found = positions.read(text)
        if not isinstance(found, PolicyError):
            active = checked.active
            context["changes"] = changes.changes_in_words(ctx, None if active is None else active.body, found[1])
            if active is not None and base is not None and active.version != base:
                status = HTTPStatus.CONFLICT
                older = page.versions(ctx).filter(name=name, version=base).first()
                context["conflict"] = changes.conflict(ctx, None if older is None else older.body, active, found[0])
    return render_page(
        ctx,
        "routing/changes.html",
        _("What changes"),
        status=status,
        form=form,
        given={"name": name, "body": text, "base": base},
        marks=editor.check_marks(ctx, checked, text, name_error),
        breadcrumbs=_crumbs(ctx),
        back=ctx.url("routing"),
        **context,
    )


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
        forms.Form(bound_data(ctx)),
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
        return {"name": row.name, "body": pretty(row.body), "base": row.based_on or 0}, row
    if _is_id(text):
        version = _version(ctx, int(text))
        return {"name": version.name, "body": pretty(version.body)}, None
    return {"name": "", "body": EXAMPLE}, None


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
