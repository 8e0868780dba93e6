"""Forms of alert channels, and of muting the alerts of a budget."""

from __future__ import annotations

from datetime import datetime, timedelta

from django import forms
from django.utils.text import capfirst

from frontend.core.backend_messages import translate_lazily
from frontend.core.languages import lazy_text as _lazy
from frontend.core.plain_text_field import PLAIN_TEXT, PlainTextField
from tenants.webhooks.event_types import EVENT_TYPES

MUTES = (
    ("1", _lazy("1 hour")),
    ("8", _lazy("8 hours")),
    ("24", _lazy("24 hours")),
    ("168", _lazy("7 days")),
    ("0", _lazy("Not muted")),
)


class ChannelForm(forms.Form):
    """The events and the name of a channel."""

    description = forms.CharField(
        label=_lazy("Name"), max_length=200, required=False, help_text=_lazy("For example #billing")
    )
    event_types = forms.MultipleChoiceField(
        label=_lazy("Events"),
        required=False,
        choices=[(name, capfirst(translate_lazily(kind.description))) for name, kind in EVENT_TYPES.items()],
        initial=[name for name, event_type in EVENT_TYPES.items() if event_type.is_alert],
        widget=forms.CheckboxSelectMultiple,
        help_text=_lazy("Leave blank for all events, including future event types"),
    )


class SlackForm(ChannelForm):
    """A new Slack-compatible channel."""

    url = forms.URLField(
        label=_lazy("Incoming webhook URL"),
        max_length=500,
        assume_scheme="https",
        help_text=_lazy(
            "From Slack, Mattermost or another server with Slack-compatible webhooks. It is stored encrypted."
        ),
        widget=forms.URLInput(attrs=PLAIN_TEXT | {"placeholder": "https://hooks.slack.com/services/…"}),
    )
    field_order = ("url", "description", "event_types")


class PagerDutyForm(ChannelForm):
    """A new PagerDuty channel."""

    routing_key = PlainTextField(
        label=_lazy("Integration key"),
        max_length=64,
        help_text=_lazy("Of an Events API v2 integration. It is stored encrypted."),
    )
    region = forms.ChoiceField(label=_lazy("Region"), choices=(("us", "US"), ("eu", "EU")))
    field_order = ("routing_key", "region", "description", "event_types")


class MuteForm(forms.Form):
    """How long the alerts of a budget are not sent."""

    hours = forms.ChoiceField(label=_lazy("Mute for"), choices=MUTES, initial="8")

    def until(self, now: datetime) -> datetime | None:
        """Return the end of the mute; None for no mute."""
        hours = int(self.cleaned_data["hours"])
        return now + timedelta(hours=hours) if hours else None
