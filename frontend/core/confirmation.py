"""Confirmation of actions that cannot be undone, by typing the name of the object.

Other actions have a button only. docs/guides/console.md has the rule.
"""

from __future__ import annotations

from typing import Any

from django import forms
from django.utils.translation import gettext as _

from frontend.core.plain_text_field import PLAIN_TEXT, PlainTextField


class Confirm(forms.Form):
    """A form that is valid only if `name` was typed."""

    typed = PlainTextField(max_length=254)

    def __init__(self, name: str, data: Any = None) -> None:
        super().__init__(data)
        self._name = name
        self.fields["typed"].widget.attrs |= PLAIN_TEXT
        self.fields["typed"].label = _("Type %(name)s to confirm") % {"name": name}

    def clean_typed(self) -> str:
        typed: str = self.cleaned_data["typed"]
        if typed.strip() != self._name:
            raise forms.ValidationError(_("This does not match %(name)s.") % {"name": self._name})
        return typed
