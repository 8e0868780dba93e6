"""The form of a new batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django import forms
from django.db.models import Q
from django.utils.translation import gettext as _

from frontend.core.languages import day_text
from frontend.core.languages import lazy_text as _lazy
from frontend.core.page_context import PageContext
from millrace.apps.batches.models import File
from millrace.apps.batches.tenant_actions import ENDPOINTS
from tenants.models import ApiKey

MAX_KEYS = 200


def usable_keys(ctx: PageContext) -> dict[str, ApiKey]:
    """Return the keys that can run a batch, by the form's value. Call inside `ctx.scope()`."""
    live = ApiKey.objects.for_tenant(ctx.tenant).filter(revoked_at=None, scopes__contains=["inference"])
    rows = live.filter(Q(expires_at=None) | Q(expires_at__gt=ctx.now)).select_related("project")
    return {str(row.pk): row for row in rows.order_by("name", "pk")[:MAX_KEYS]}


class BatchForm(forms.Form):
    """A file, uploaded now or before, with the endpoint and the key of its requests."""

    upload = forms.FileField(
        label=_lazy("Upload a file"),
        required=False,
        max_length=255,
        help_text=_lazy("JSON Lines, up to 8 MB. Upload larger files to /v1/files."),
        widget=forms.ClearableFileInput({"accept": ".jsonl,application/jsonl"}),
    )
    file = forms.ChoiceField(label=_lazy("Or use an uploaded file"), required=False)
    endpoint = forms.ChoiceField(label=_lazy("Endpoint"), choices=[(name, name) for name in ENDPOINTS])
    key = forms.ChoiceField(
        label=_lazy("API key"), help_text=_lazy("Its limits and budgets apply and the usage is billed to it.")
    )

    def __init__(
        self,
        keys: Mapping[str, ApiKey],
        files: Sequence[File],
        data: Any = None,
        uploads: Any = None,
        initial: Any = None,
    ) -> None:
        super().__init__(data, uploads, initial=initial)
        named = [(row.name, f"{row.filename or row.name} ({day_text(row.created_at, 'j M')})") for row in files]
        self.fields["file"].choices = [("", _("None")), *named]  # type: ignore[attr-defined]
        self.fields["key"].choices = [  # type: ignore[attr-defined]
            (value, f"{row.name} ({row.project.name})") for value, row in keys.items()
        ]

    def clean(self) -> dict[str, Any]:
        data = super().clean() or {}
        if not self.errors and not data.get("upload") and not data.get("file"):
            self.add_error("upload", _("Upload a file, or choose one that was uploaded before."))
        return data
