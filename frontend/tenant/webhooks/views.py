"""Webhooks: the page, the drawers of an endpoint and of a delivery, and the forms."""

from __future__ import annotations

from typing import Any

from django import forms
from django.http import HttpResponse
from django.urls import path
from django.utils.translation import gettext as _

from frontend.core.backend_messages import translate_lazily
from frontend.core.confirmation import Confirm
from frontend.core.form_view import bound_data, form_view
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.one_time_secrets import OnceForm, secret_form_view, take_secret
from frontend.core.page_context import FORM, PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import redirect_with_message, render_page
from frontend.core.screens import ConsoleScreen, PaletteAction
from frontend.tenant.webhooks import page
from inference_worker.contract.texts import Text
from tenants.actions import webhooks as actions
from tenants.models import WebhookEndpoint
from tenants.permissions import Permission
from tenants.webhooks.event_types import EVENT_TYPES
from tenants.webhooks.queries import deliveries

PANELS = Panels(
    "webhooks-panel",
    (
        Panel("endpoints", _lazy("Endpoints"), "webhooks/page.html#endpoints", page.endpoints),
        Panel("deliveries", _lazy("Deliveries"), "webhooks/page.html#deliveries", page.log, every=10),
    ),
)


class EndpointForm(forms.Form):
    """The URL of an endpoint, and the events it receives."""

    url = forms.URLField(
        label=_lazy("URL"),
        max_length=500,
        assume_scheme="https",
        help_text=_lazy("Public https URL. Receives signed events by POST"),
        widget=forms.URLInput(attrs={"autocomplete": "off", "placeholder": "https://example.com/millrace"}),
    )
    description = forms.CharField(label=_lazy("Description"), max_length=200, required=False)
    event_types = forms.MultipleChoiceField(
        label=_lazy("Events"),
        required=False,
        choices=[
            (name, translate_lazily(Text("%(name)s: %(description)s", name=name, description=kind.description)))
            for name, kind in EVENT_TYPES.items()
        ],
        widget=forms.CheckboxSelectMultiple,
        help_text=_lazy("Leave blank for all events, including future event types"),
    )


class ChannelChangeForm(EndpointForm):
    """The events of a channel or listener, whose target cannot be changed."""

    url = None  # type: ignore[assignment]


class NewEndpointForm(OnceForm, EndpointForm):
    """A new endpoint, whose signing secret is shown once."""


@tenant_page(Permission.WEBHOOKS_READ)
def webhooks(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        context = {"filters": page.filters(ctx), **page.TOOLS.page(ctx)}
    return render_page(ctx, "webhooks/page.html", _("Webhooks"), panels=PANELS, **context)


@tenant_page(Permission.WEBHOOKS_READ)
def endpoint(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        found = page.endpoint(ctx)
    return render_page(ctx, "webhooks/detail.html", _("Endpoint"), breadcrumbs=_crumbs(ctx), **found)


@tenant_page(Permission.WEBHOOKS_READ)
def delivery(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        found = page.delivery_detail(ctx)
    return render_page(ctx, "webhooks/delivery.html", _("Delivery"), breadcrumbs=_crumbs(ctx), **found)


@tenant_page(Permission.WEBHOOKS_WRITE, methods=FORM)
def create_endpoint(ctx: PageContext) -> HttpResponse:
    def create(data: dict[str, Any]) -> tuple[str, str]:
        row, secret = actions.do_create_endpoint(ctx.tenant, data.pop("url"), **data)
        return ctx.url("webhooks-secret", row.pk), secret

    form = NewEndpointForm(bound_data(ctx))
    return secret_form_view(ctx, _("Add endpoint"), form, create, submit=_("Add endpoint"), **_sheet(ctx))


@tenant_page(Permission.WEBHOOKS_WRITE, methods=FORM)
def edit(ctx: PageContext) -> HttpResponse:
    row = _endpoint(ctx)
    form = EndpointForm if row.kind == WebhookEndpoint.Kind.WEBHOOK else ChannelChangeForm
    initial = {"url": row.url, "description": row.description, "event_types": row.event_types}
    return form_view(
        ctx,
        _("Edit endpoint"),
        form(bound_data(ctx), initial=initial),
        lambda data: actions.do_update_endpoint(row, **data),
        message=lambda changed: _("%(url)s was updated.") % {"url": changed.url},
        submit=_("Save"),
        **_sheet(ctx),
    )


@tenant_page(Permission.WEBHOOKS_WRITE, methods=FORM)
def rotate(ctx: PageContext) -> HttpResponse:
    row = _endpoint(ctx)

    def change(_: dict[str, Any]) -> tuple[str, str]:
        return ctx.url("webhooks-secret", row.pk), actions.do_rotate_webhook_secret(row)

    effect = _("Creates a new secret, shown once. Events are signed with both secrets for 24 hours.")
    form = OnceForm(bound_data(ctx))
    return secret_form_view(ctx, _("Rotate secret"), form, change, submit=_("Rotate"), effect=effect, **_sheet(ctx))


@tenant_page(Permission.WEBHOOKS_WRITE)
def secret(ctx: PageContext) -> HttpResponse:
    """Show the signing secret that the user has just created. Later requests are redirected to the endpoints."""
    row = _endpoint(ctx)
    back = ctx.url("webhooks")
    found = take_secret(ctx) if ctx.request.method == "GET" else None
    if found is None:
        message = _("The signing secret of %(url)s was shown once. Rotate it to get a new one.") % {"url": row.url}
        return redirect_with_message(ctx, back, message)
    context: dict[str, Any] = {"endpoint": row, "secret": found, "back": back}
    return render_page(ctx, "webhooks/page.html#secret", _("Signing secret"), breadcrumbs=_crumbs(ctx), **context)


@tenant_page(Permission.WEBHOOKS_WRITE, methods=FORM)
def test(ctx: PageContext) -> HttpResponse:
    row = _endpoint(ctx)
    return form_view(
        ctx,
        _("Send test event"),
        forms.Form(bound_data(ctx)),
        lambda _: actions.do_send_test_event(row),
        message=lambda _done: _("Test event queued for %(url)s. See the delivery log.") % {"url": row.url},
        effect=_("Sends one webhook.test event to %(url)s.") % {"url": row.url},
        submit=_("Send"),
        **_sheet(ctx),
    )


@tenant_page(Permission.WEBHOOKS_WRITE, methods=FORM)
def toggle(ctx: PageContext) -> HttpResponse:
    """Disable or enable an endpoint."""
    row = _endpoint(ctx)
    action = _("Disable") if row.active else _("Enable")
    effect = (
        _("Stops all events to this endpoint. Pending deliveries fail and can be replayed later.")
        if row.active
        else _("The endpoint receives events again. Failed deliveries can be replayed.")
    )
    return form_view(
        ctx,
        _("Disable endpoint") if row.active else _("Enable endpoint"),
        forms.Form(bound_data(ctx)),
        lambda _: actions.do_update_endpoint(row, active=not row.active),
        message=lambda changed: (
            _("%(url)s is enabled.") % {"url": changed.url}
            if changed.active
            else _("%(url)s is disabled.") % {"url": changed.url}
        ),
        effect=effect,
        submit=action,
        **_sheet(ctx),
    )


@tenant_page(Permission.WEBHOOKS_WRITE, methods=FORM)
def delete(ctx: PageContext) -> HttpResponse:
    row = _endpoint(ctx)
    host = row.url.partition("://")[2].partition("/")[0]
    return form_view(
        ctx,
        _("Delete endpoint"),
        Confirm(host, bound_data(ctx)),
        lambda _: actions.do_delete_endpoint(row),
        message=lambda _done: _("%(url)s was deleted.") % {"url": row.url},
        effect=_("%(url)s receives no more events. Its delivery log is deleted.") % {"url": row.url},
        danger=True,
        submit=_("Delete"),
        **_sheet(ctx),
    )


@tenant_page(Permission.WEBHOOKS_WRITE, methods=FORM)
def replay(ctx: PageContext) -> HttpResponse:
    row = ctx.get(lambda: deliveries(ctx.tenant.pk).filter(pk=ctx.arguments["delivery"]))
    return form_view(
        ctx,
        _("Replay delivery"),
        forms.Form(bound_data(ctx)),
        lambda _: actions.do_replay(row),
        message=lambda _result: _("Replay queued. It is sent within seconds."),
        effect=_("Sends %(event_type)s to %(url)s again with the same webhook-id.")
        % {"event_type": row.event.event_type, "url": row.endpoint.url},
        submit=_("Replay"),
        **_sheet(ctx),
    )


def _endpoint(ctx: PageContext) -> WebhookEndpoint:
    return ctx.get(lambda: WebhookEndpoint.objects.for_tenant(ctx.tenant).filter(pk=ctx.arguments["endpoint"]))


def _crumbs(ctx: PageContext) -> tuple[Breadcrumb, ...]:
    return (Breadcrumb(_("Webhooks"), ctx.url("webhooks")),)


def _sheet(ctx: PageContext) -> dict[str, Any]:
    return {"back": ctx.url("webhooks"), "breadcrumbs": _crumbs(ctx)}


_ROOT = "t/<slug:slug>/webhooks/"
SCREEN = ConsoleScreen(
    "webhooks",
    _lazy("Webhooks"),
    icon="webhooks",
    letter="w",
    group="organization",
    order=20,
    needs=Permission.WEBHOOKS_READ,
    actions=(
        PaletteAction(
            _lazy("Add webhook endpoint"), "webhooks-new", "webhooks", Permission.WEBHOOKS_WRITE, in_dialog=True
        ),
    ),
)
urlpatterns = [
    path(_ROOT, webhooks, name="webhooks"),
    path(f"{_ROOT}new", create_endpoint, name="webhooks-new"),
    *page.TOOLS.tenant_urls(_ROOT, Permission.WEBHOOKS_READ),
    path(f"{_ROOT}<int:endpoint>/", endpoint, name="webhooks-detail"),
    path(f"{_ROOT}<int:endpoint>/edit", edit, name="webhooks-edit"),
    path(f"{_ROOT}<int:endpoint>/rotate", rotate, name="webhooks-rotate"),
    path(f"{_ROOT}<int:endpoint>/secret", secret, name="webhooks-secret"),
    path(f"{_ROOT}<int:endpoint>/test", test, name="webhooks-test"),
    path(f"{_ROOT}<int:endpoint>/toggle", toggle, name="webhooks-toggle"),
    path(f"{_ROOT}<int:endpoint>/delete", delete, name="webhooks-delete"),
    path(f"{_ROOT}deliveries/<int:delivery>", delivery, name="webhooks-delivery"),
    path(f"{_ROOT}deliveries/<int:delivery>/replay", replay, name="webhooks-replay"),
    PANELS.tenant_url(_ROOT, Permission.WEBHOOKS_READ),
]
