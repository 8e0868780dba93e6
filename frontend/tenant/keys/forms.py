"""Forms of keys and projects."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date, datetime, time, timedelta, tzinfo
from typing import Any

from django import forms
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from frontend.core.day_field import DayField
from frontend.core.languages import lazy_text as _lazy
from frontend.core.numbers import exact
from frontend.core.one_time_secrets import OnceForm
from frontend.core.page_context import PageContext
from frontend.core.plain_text_field import PLAIN_TEXT, PlainTextField
from frontend.tenant.keys.key_limits import NAMES
from frontend.tenant.keys.page import SCOPES, owner
from millrace.apps.deployments.served_deployments import served_specs
from tenants.models import ApiKey, Project, RoutingPolicy
from tenants.models.keys import MAX_COST_CENTER_LENGTH
from tenants.one_line_text import check_line
from tenants.permissions import SCOPE_NEEDS, Permission

OVERLAPS = (
    ("0", _lazy("None: revoke the old key now")),
    ("1", _lazy("1 hour")),
    ("24", _lazy("1 day")),
    ("168", _lazy("7 days")),
    ("720", _lazy("30 days")),
)
BULK_LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "concurrency",
)  # rate limits of the form that changes several keys
MAX_LIMIT = 2**31 - 1  # the largest number of a rate limit's column


def expiry_of(day: date, zone: tzinfo) -> datetime:
    """Return the first instant after the day, in the user's time zone."""
    return datetime.combine(day + timedelta(days=1), time(), zone)


class KeyForm(forms.Form):
    """The settings of a key that can be changed."""

    name = PlainTextField(max_length=200, help_text=_lazy("For example: prod-support"))
    scopes = forms.MultipleChoiceField(label=_lazy("Permissions"), widget=forms.CheckboxSelectMultiple)
    models = forms.MultipleChoiceField(
        label=_lazy("Models"),
        widget=forms.CheckboxSelectMultiple,
        required=False,
        help_text=_lazy("Leave blank to allow all models"),
    )
    addresses = forms.CharField(
        label=_lazy("Allowed IPs"),
        required=False,
        widget=forms.TextInput({**PLAIN_TEXT, "placeholder": "203.0.113.0/24, 2001:db8::/32"}),
        help_text=_lazy("IP addresses or networks (CIDR). Leave blank to allow any"),
    )
    cost_center = PlainTextField(
        label=_lazy("Cost center"),
        required=False,
        max_length=MAX_COST_CENTER_LENGTH,
        validators=[check_line],
        help_text=_lazy("Invoices divide the usage by it. For example: 4711 Support"),
    )
    expires_on = DayField(
        label=_lazy("Expires on"),
        required=False,
        help_text=_lazy("The key works until the end of this day. Leave blank for no expiration date"),
    )

    def __init__(self, ctx: PageContext, data: Any = None, key: ApiKey | None = None) -> None:
        super().__init__(data, initial=_initial(ctx, key))
        self._zone = ctx.zone
        self.fields["scopes"].choices = [  # type: ignore[attr-defined]
            (name, label) for name, label in SCOPES.items() if ctx.may(SCOPE_NEEDS.get(name, Permission.KEYS_WRITE))
        ]
        known = dict.fromkeys([*_models(ctx), *((key.allowed_models or ()) if key else ())])
        self.fields["models"].choices = [(name, name) for name in known]  # type: ignore[attr-defined]

    def chosen(self) -> dict[str, Any]:
        """Return the values as arguments of the key actions."""
        data = self.cleaned_data
        networks = [word for word in re.split(r"[\s,;]+", data["addresses"]) if word]
        return {
            "name": data["name"],
            "scopes": data["scopes"],
            "allowed_models": data["models"] or None,
            "allowed_ip_ranges": networks or None,
            "cost_center": data["cost_center"],
            "expires_at": expiry_of(data["expires_on"], self._zone) if data["expires_on"] else None,
        }


class NewKeyForm(OnceForm, KeyForm):
    """A new key, with its project, which cannot be changed later."""

    project = forms.ChoiceField(help_text=_lazy("Usage is billed to this project. You can’t change it later."))
    field_order = ("name", "project")

    def __init__(self, ctx: PageContext, projects: list[Project], data: Any = None) -> None:
        super().__init__(ctx, data)
        self.fields["project"].choices = [(str(row.pk), row.name) for row in projects]  # type: ignore[attr-defined]


class RotationForm(OnceForm):
    overlap = forms.ChoiceField(
        label=_lazy("Keep old key active for"),
        choices=OVERLAPS,
        initial="24",
        help_text=_lazy("Time to replace the old key with the new one"),
    )


class NewProjectForm(forms.Form):
    name = PlainTextField(max_length=200)
    slug = forms.SlugField(
        max_length=50,
        required=False,
        widget=forms.TextInput(PLAIN_TEXT),
        help_text=_lazy(
            "Used in the API. Can’t be changed. For example: support-bot. Leave blank to derive it from the name"
        ),
    )


class ProjectNameForm(forms.Form):
    name = PlainTextField(max_length=200)


def _initial(ctx: PageContext, key: ApiKey | None) -> dict[str, Any]:
    if key is None:
        return {"scopes": ["inference", "models"]}
    last = key.expires_at and (key.expires_at - timedelta(microseconds=1)).astimezone(ctx.zone).date()
    return {
        "name": key.name,
        "scopes": key.scopes,
        "models": key.allowed_models or [],
        "addresses": ", ".join(key.allowed_ip_ranges or []),
        "cost_center": key.cost_center,
        "expires_on": last,
    }


def _models(ctx: PageContext) -> list[str]:
    """Return the names that callers may request: the platform's models and the tenant's aliases."""
    own = RoutingPolicy.objects.for_tenant(ctx.tenant).filter(active=True).order_by("name")
    return [*own.values_list("name", flat=True), *(model.name for model in served_specs())]


def revocation_effect(key: ApiKey, requests: int) -> str:
    """Return a description of the effect of revoking the key."""
    texts = [
        _("%(name)s (%(prefix)s…), created by %(owner)s, stops working immediately. Its running streams end.")
        % {"name": key.name, "prefix": key.prefix, "owner": owner(key)}
    ]
    if requests:
        text = ngettext(
            "It had %(number)s accepted request this month.",
            "It had %(number)s accepted requests this month.",
            requests,
        )
        texts.append(text % {"number": exact(requests)})
    return " ".join([*texts, _("This cannot be undone. Past usage is still billed.")])


class SelectedKeysForm(forms.Form):
    """Several keys, which are listed and can be left out."""

    key = forms.MultipleChoiceField(label=_lazy("API keys"), widget=forms.CheckboxSelectMultiple)

    def __init__(self, rows: Sequence[ApiKey], data: Any = None) -> None:
        super().__init__(data, initial={"key": [str(row.pk) for row in rows]})
        self.fields["key"].choices = [  # type: ignore[attr-defined]
            (str(row.pk), f"{row.name} ({row.prefix}…)") for row in rows
        ]


class EditKeysForm(SelectedKeysForm):
    """Changes of several keys. A field that is left blank changes nothing."""

    expires_on = DayField(
        label=_lazy("Expires on"), required=False, help_text=_lazy("The keys work until the end of this day")
    )
    never_expires = forms.BooleanField(label=_lazy("No expiration date"), required=False)
    cost_center = PlainTextField(
        label=_lazy("Cost center"),
        required=False,
        max_length=MAX_COST_CENTER_LENGTH,
        validators=[check_line],
    )

    def __init__(self, ctx: PageContext, rows: Sequence[ApiKey], data: Any = None) -> None:
        super().__init__(rows, data)
        self._zone = ctx.zone
        for name in BULK_LIMITS if ctx.may(Permission.LIMITS_WRITE) else ():
            self.fields[name] = forms.IntegerField(
                label=NAMES[name],
                required=False,
                min_value=0,
                max_value=MAX_LIMIT,
                widget=forms.TextInput({**PLAIN_TEXT, "inputmode": "numeric"}),
            )

    def clean(self) -> dict[str, Any]:
        data = super().clean() or {}
        if data.get("expires_on") and data.get("never_expires"):
            self.add_error("never_expires", _("Choose a day or no expiration date, not both."))
        if not self.errors and not self.changes() and not self.limits():
            raise forms.ValidationError(_("Enter at least one change."))
        return data

    def changes(self) -> dict[str, Any]:
        """Return the changed fields as arguments of the action."""
        data, found = self.cleaned_data, {}
        if data["expires_on"] or data["never_expires"]:
            found["expires_at"] = expiry_of(data["expires_on"], self._zone) if data["expires_on"] else None
        return found | ({"cost_center": data["cost_center"]} if data["cost_center"] else {})

    def limits(self) -> dict[str, int]:
        """Return the entered rate limits."""
        found = {name: self.cleaned_data.get(name) for name in BULK_LIMITS}
        return {name: value for name, value in found.items() if value is not None}
