"""Confirmation of actions that cannot be undone, by typing the name of the object."""

from __future__ import annotations

from typing import Any

from django import forms


class Confirm(forms.Form):
    """A form that is valid only if `name` was typed."""

    typed = forms.CharField(
        max_length=254, widget=forms.TextInput(attrs={"autocomplete": "off", "spellcheck": "false"})
    )

    def __init__(self, name: str, data: Any = None) -> None:
        super().__init__(data)
        self._name = name
        self.fields["typed"].widget.attrs |= {"autocomplete": "off", "spellcheck": "false"}
        self.fields["typed"].label = f"Type {name} to confirm"

    def clean_typed(self) -> str:
        typed: str = self.cleaned_data["typed"]
        if typed.strip() != self._name:
            raise forms.ValidationError(f"This does not match {self._name}.")
        return typed
