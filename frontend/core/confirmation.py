"""The form of what cannot be undone: one types the name of what it is done to."""

from __future__ import annotations

from typing import Any

from django import forms


class Confirm(forms.Form):
    """Valid only if `name` was typed. The page says next to it what will happen."""

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
