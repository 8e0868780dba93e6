"""Forms that create a secret: each is processed once, and redirects to a page that shows the secret once.

A form carries a random token. The first POST stores the URL of its result. A repeated POST with the same token and
values, as by a double click, is redirected to the same URL and changes nothing. The secret is stored encrypted in a row
that its page reads and deletes. Both are rows of `IdempotentResponse`, which a job deletes after a day.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from cryptography.fernet import Fernet
from django import forms
from django.db import IntegrityError, transaction
from django.db.models import QuerySet
from django.http import HttpResponse, HttpResponseRedirect
from django.utils.crypto import salted_hmac

from frontend.core.page_context import PageContext
from frontend.core.rendering import render_form_errors, render_page, run_action
from tenants.models import IdempotentResponse

SECRET_TTL = timedelta(minutes=10)  # from the form to the page


class OnceForm(forms.Form):
    """A form with a token, by which a repeated POST is recognized."""

    form_token = forms.CharField(
        max_length=64, required=False, widget=forms.HiddenInput, initial=lambda: secrets.token_urlsafe(24)
    )


def create_secret(
    ctx: PageContext, form: OnceForm, action: Callable[[dict[str, Any]], tuple[str, str]]
) -> HttpResponse | None:
    """Run the action for the form's clean data, and redirect to the page that it returns with the secret.

    Returns None if the form is invalid or the action was rejected. If the form was already processed, the action does
    not run.
    """

    def run(data: dict[str, Any]) -> str:
        name = f"form {ctx.request.path} {ctx.request.POST.urlencode()}" if data.pop("form_token") else ""
        with ctx.scope():
            if name and (first := _claim(ctx, name)) is not None:
                return first
            url, secret = action(data)
            rows = _rows(ctx)
            if name:
                rows.filter(**_make_lookup(ctx, name)).update(body=url.encode())
            rows.filter(**_make_lookup(ctx, f"secret {url}")).delete()
            _insert(ctx, f"secret {url}", _cipher(ctx, url).encrypt(secret.encode()))
            return url

    result = run_action(form, run)
    if result is None:
        return None
    response = HttpResponseRedirect(result.value)
    response.status_code = 303  # htmx follows it inside the dialog
    return response


def secret_form_view(
    ctx: PageContext, title: str, form: OnceForm, action: Callable[[dict[str, Any]], tuple[str, str]], **context: Any
) -> HttpResponse:
    """Show the form, and process it once. `context` is that of `form_view`: `submit`, `back`, `effect`."""
    shown = {"action": ctx.request.path, **context}
    if ctx.request.method == "POST":
        created = create_secret(ctx, form, action)
        return created or render_form_errors(ctx, "frontend/form.html", title, form, **shown)
    return render_page(ctx, "frontend/form.html", title, form=form, **shown)


def take_secret(ctx: PageContext) -> str | None:
    """Return the secret that waits for this page and delete it. None if it was read before, or is too old."""
    url = ctx.request.path
    with ctx.scope():
        rows = _rows(ctx).filter(**_make_lookup(ctx, f"secret {url}"))
        row = rows.select_for_update().first()
        if row is None or row.body is None:
            return None
        row.delete()
        if row.created_at < ctx.now - SECRET_TTL:
            return None
        return _cipher(ctx, url).decrypt(bytes(row.body)).decode()


def _claim(ctx: PageContext, name: str) -> str | None:
    """Mark the form as processed in this transaction. If it already was, return the URL of its result.

    A concurrent POST of the same form waits here until the first one has ended.
    """
    try:
        with transaction.atomic():
            _insert(ctx, name, b"")
    except IntegrityError:
        row = _rows(ctx).filter(**_make_lookup(ctx, name)).get()
        return bytes(row.body or b"").decode()
    return None


def _insert(ctx: PageContext, name: str, body: bytes) -> None:
    tenant_id = None if ctx.access is None else ctx.tenant.pk
    row = IdempotentResponse(tenant_id=tenant_id, request_hash=b"", status=303, body=body, **_make_lookup(ctx, name))
    row.save(force_insert=True)


def _rows(ctx: PageContext) -> QuerySet[IdempotentResponse]:
    """Return the tenant's rows. Those of operators belong to no tenant."""
    rows: QuerySet[IdempotentResponse] = (
        IdempotentResponse.objects.all_tenants().filter(tenant_id=None)
        if ctx.access is None
        else IdempotentResponse.objects.for_tenant(ctx.tenant)
    )
    return rows


def _make_lookup(ctx: PageContext, name: str) -> dict[str, str]:
    """Return the unique name of a row of this user. API calls of the same user have another caller."""
    return {"caller": f"console:{ctx.user.pk}", "name": hashlib.sha256(name.encode()).hexdigest()}


def _cipher(ctx: PageContext, url: str) -> Fernet:
    """Return the cipher of a page's secret. Its key is derived from Django's secret key and is not stored."""
    key = salted_hmac("frontend.core.one_time_secrets", f"{ctx.user.pk}\n{url}", algorithm="sha256").digest()
    return Fernet(base64.urlsafe_b64encode(key))
