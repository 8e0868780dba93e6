"""Webhooks: the page, an endpoint's drawer with what can be done to it, a delivery's drawer, and the forms."""

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
from frontend.core.rendering import carry_out, refused, show
from frontend.tenant.webhooks import page
from tenants.actions import webhooks as actions
from tenants.models import WebhookDelivery, WebhookEndpoint
from tenants.permissions import Permission
from tenants.webhooks.event_types import KINDS

PANELS = Panels(
    "webhooks-panel",
    (
        Panel("endpoints", "Endpoints", "webhooks/endpoints.html", page.endpoints),
        Panel("deliveries", "Deliveries", "webhooks/deliveries.html", page.log, every=10),
    ),
)


class EndpointForm(forms.Form):
    """Where to, and of what."""

    url = forms.URLField(
        label="URL",
        max_length=500,
        assume_scheme="https",
        help_text="Public https URL. Receives signed events by POST",
        widget=forms.URLInput(attrs={"autocomplete": "off", "placeholder": "https://example.com/millrace"}),
    )
    description = forms.CharField(label="Description", max_length=200, required=False)
    kinds = forms.MultipleChoiceField(
        label="Events",
        required=False,
        choices=[(kind, f"{kind}: {said}") for kind, said in KINDS.items()],
        widget=forms.CheckboxSelectMultiple,
        help_text="Leave blank for all events, including future event types",
    )


@tenant_page(Permission.WEBHOOKS_READ)
def webhooks(visit: PageContext) -> HttpResponse:
    with visit.scope():
        fields = page.fields(visit)
    new_url = visit.url("webhooks-new") if visit.may(Permission.WEBHOOKS_WRITE) else ""
    return show(visit, "webhooks/page.html", "Webhooks", panels=PANELS, fields=fields, new_url=new_url)


@tenant_page(Permission.WEBHOOKS_READ)
def one(visit: PageContext) -> HttpResponse:
    with visit.scope():
        found = page.endpoint(visit, visit.arguments["endpoint"])
    if found is None:
        raise Http404
    verbs = ("edit", "rotate", "test", "toggle", "delete")
    urls = {verb: visit.url(f"webhooks-{verb}", visit.arguments["endpoint"]) for verb in verbs}
    log_url = f"{visit.url('webhooks')}?endpoint={visit.arguments['endpoint']}"
    given: dict[str, Any] = {
        "endpoint": found,
        "urls": urls,
        "log_url": log_url,
        "may": visit.may(Permission.WEBHOOKS_WRITE),
    }
    return show(visit, "webhooks/detail.html", "Endpoint", breadcrumbs=_crumbs(visit), **given)


@tenant_page(Permission.WEBHOOKS_READ)
def delivery(visit: PageContext) -> HttpResponse:
    with visit.scope():
        found = page.story(visit, visit.arguments["delivery"])
    if found is None:
        raise Http404
    return show(visit, "webhooks/delivery.html", "Delivery", breadcrumbs=_crumbs(visit), story=found)


@tenant_page(Permission.WEBHOOKS_WRITE, methods=FORM)
def new(visit: PageContext) -> HttpResponse:
    form = EndpointForm(posted(visit))
    title, sheet = "Add endpoint", {"action": visit.request.path, "submit": "Add endpoint", **_sheet(visit)}
    if visit.request.method != "POST":
        return show(visit, "frontend/form.html", title, form=form, **sheet)
    made = carry_out(form, lambda data: actions.do_create_endpoint(visit.tenant, data.pop("url"), **data))
    if made is None:
        return refused(visit, "frontend/form.html", title, form, **sheet)
    endpoint, secret = made.value
    return _secret(visit, f"{endpoint.url} now receives events", secret, "")


@tenant_page(Permission.WEBHOOKS_WRITE, methods=FORM)
def edit(visit: PageContext) -> HttpResponse:
    row = _endpoint(visit)
    initial = {"url": row.url, "description": row.description, "kinds": row.kinds}
    return ask(
        visit,
        "Edit endpoint",
        EndpointForm(posted(visit), initial=initial),
        lambda data: actions.do_update_endpoint(row, **data),
        said=lambda changed: f"{changed.url} was updated.",
        submit="Save",
        **_sheet(visit),
    )


@tenant_page(Permission.WEBHOOKS_WRITE, methods=FORM)
def rotate(visit: PageContext) -> HttpResponse:
    row = _endpoint(visit)
    form = forms.Form(posted(visit))
    title = "Rotate secret"
    effect = "Creates a new secret, shown once. Events are signed with both secrets for 24 hours."
    sheet = {"action": visit.request.path, "submit": "Rotate", "effect": effect, **_sheet(visit)}
    if visit.request.method != "POST":
        return show(visit, "frontend/form.html", title, form=form, **sheet)
    made = carry_out(form, lambda _: actions.do_rotate_webhook_secret(row))
    if made is None:
        return refused(visit, "frontend/form.html", title, form, **sheet)
    return _secret(
        visit, f"New signing secret of {row.url}", made.value, "The previous secret stays valid for 24 hours."
    )


@tenant_page(Permission.WEBHOOKS_WRITE, methods=FORM)
def test(visit: PageContext) -> HttpResponse:
    row = _endpoint(visit)
    return ask(
        visit,
        "Send test event",
        forms.Form(posted(visit)),
        lambda _: actions.do_send_test_event(row),
        said=lambda _: f"Test event queued for {row.url}. See the delivery log.",
        effect=f"Sends one webhook.test event to {row.url}.",
        submit="Send",
        **_sheet(visit),
    )


@tenant_page(Permission.WEBHOOKS_WRITE, methods=FORM)
def toggle(visit: PageContext) -> HttpResponse:
    """Disable an endpoint, or have it get events again."""
    row = _endpoint(visit)
    verb = "Disable" if row.active else "Enable"
    effect = (
        "Stops all events to this endpoint. Pending deliveries fail and can be replayed later."
        if row.active
        else "The endpoint receives events again. Failed deliveries can be replayed."
    )
    return ask(
        visit,
        f"{verb} endpoint",
        forms.Form(posted(visit)),
        lambda _: actions.do_update_endpoint(row, active=not row.active),
        said=lambda changed: f"{changed.url} is {'enabled' if changed.active else 'disabled'}.",
        effect=effect,
        submit=verb,
        **_sheet(visit),
    )


@tenant_page(Permission.WEBHOOKS_WRITE, methods=FORM)
def delete(visit: PageContext) -> HttpResponse:
    row = _endpoint(visit)
    host = row.url.partition("://")[2].partition("/")[0]
    return ask(
        visit,
        "Delete endpoint",
        Confirm(host, posted(visit)),
        lambda _: actions.do_delete_endpoint(row),
        said=lambda _: f"{row.url} was deleted.",
        effect=f"{row.url} receives no more events. Its delivery log is deleted.",
        danger=True,
        submit="Delete",
        **_sheet(visit),
    )


@tenant_page(Permission.WEBHOOKS_WRITE, methods=FORM)
def replay(visit: PageContext) -> HttpResponse:
    with visit.scope():
        rows = WebhookDelivery.objects.for_tenant(visit.tenant).select_related("event", "endpoint")
        row = rows.filter(pk=visit.arguments["delivery"]).first()
    if row is None:
        raise Http404
    return ask(
        visit,
        "Replay delivery",
        forms.Form(posted(visit)),
        lambda _: actions.do_replay(row),
        said=lambda _: "Replay queued. It is sent within seconds.",
        effect=f"Sends {row.event.kind} to {row.endpoint.url} again with the same webhook-id.",
        submit="Replay",
        **_sheet(visit),
    )


def _secret(visit: PageContext, said: str, secret: str, also: str) -> HttpResponse:
    given: dict[str, Any] = {"said": said, "secret": secret, "also": also, "back": visit.url("webhooks")}
    return show(visit, "webhooks/secret.html", "Signing secret", breadcrumbs=_crumbs(visit), **given)


def _endpoint(visit: PageContext) -> WebhookEndpoint:
    with visit.scope():
        row: WebhookEndpoint | None = (
            WebhookEndpoint.objects.for_tenant(visit.tenant).filter(pk=visit.arguments["endpoint"]).first()
        )
    if row is None:
        raise Http404
    return row


def _crumbs(visit: PageContext) -> tuple[Breadcrumb, ...]:
    return (Breadcrumb("Webhooks", visit.url("webhooks")),)


def _sheet(visit: PageContext) -> dict[str, Any]:
    return {"back": visit.url("webhooks"), "breadcrumbs": _crumbs(visit)}


_ROOT = "t/<slug:slug>/webhooks/"
urlpatterns = [
    path(_ROOT, webhooks, name="webhooks"),
    path(f"{_ROOT}new", new, name="webhooks-new"),
    path(f"{_ROOT}<int:endpoint>/", one, name="webhooks-detail"),
    path(f"{_ROOT}<int:endpoint>/edit", edit, name="webhooks-edit"),
    path(f"{_ROOT}<int:endpoint>/rotate", rotate, name="webhooks-rotate"),
    path(f"{_ROOT}<int:endpoint>/test", test, name="webhooks-test"),
    path(f"{_ROOT}<int:endpoint>/toggle", toggle, name="webhooks-toggle"),
    path(f"{_ROOT}<int:endpoint>/delete", delete, name="webhooks-delete"),
    path(f"{_ROOT}deliveries/<int:delivery>", delivery, name="webhooks-delivery"),
    path(f"{_ROOT}deliveries/<int:delivery>/replay", replay, name="webhooks-replay"),
    PANELS.tenant_url(_ROOT, Permission.WEBHOOKS_READ),
]
