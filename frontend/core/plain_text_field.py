"""The form field of names, identifiers and other texts that the browser must not complete or correct."""

from __future__ import annotations

from typing import Any

from django import forms

PLAIN_TEXT = {"autocomplete": "off", "spellcheck": "false"}  # attributes of a text box


class PlainTextField(forms.CharField):
    """A line of text without the browser's completion and spelling check."""

    def __init__(self, **options: Any) -> None:
        super().__init__(widget=forms.TextInput(attrs=PLAIN_TEXT), **options)
