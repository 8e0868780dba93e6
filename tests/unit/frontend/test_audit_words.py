"""The words of audit entries."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.utils import translation

from frontend.core.audit_fields import VALUE_LABELS
from frontend.core.audit_words import _FIELDS, _VERBS, _WORDS, OBJECTS, action_label, field_label, value_text
from tenants.models import ApiKey


@pytest.mark.parametrize(
    ("action", "label"),
    [
        ("key.created", "API key created"),
        ("user.second_factor_removed", "User second factor removed"),
        ("billing_profile.updated", "Billing details updated"),
        ("some_thing.was_done", "Some thing was done"),
    ],
)
def test_actions_are_words(action, label):
    assert action_label(action) == label


def test_all_recorded_actions_have_words():
    root = Path(__file__).parents[3]
    sources = [path.read_text() for part in ("tenants", "billing", "platform") for path in (root / part).rglob("*.py")]
    recorded = set(re.findall(r'audit\.record\(\s*"([a-z_]+)\.([a-z_]+)"', "".join(sources)))
    assert len(recorded) > 60
    assert {kind for kind, _ in recorded} - set(OBJECTS) == set()
    assert {verb for _, verb in recorded} - set(_VERBS) == set()


@pytest.mark.parametrize(
    ("field", "label"),
    [("nano_per_hour", "Cost per hour"), ("max_models", "Max models"), ("project_id", "Project"), ("x_nano", "X")],
)
def test_fields_are_words(field, label):
    assert field_label(field) == label


@pytest.mark.parametrize(
    ("field", "value", "unit", "text"),
    [
        ("nano_per_hour", 500_000_000, "", "$0.50/h"),
        ("included_nano", 1_500_000_000, "", "$1.50"),
        ("cents", -363, "", "$-3.63"),
        ("amount", 2_000_000_000, "money", "$2.00"),
        ("amount", 2_000_000, "tokens", "2,000,000 tokens"),
        ("amount", 7, "", "7"),
        ("rate_ppm", 190_000, "", "19 %"),
        ("rate_ppm", 72_500, "", "7.25 %"),
        ("answer_cache_seconds", 7200, "", "2 h"),
        ("answer_cache_seconds", 90, "", "90 s"),
        ("content_retention_days", 1, "", "1 day"),
        ("thresholds", [50, 80], "", "50, 80 %"),
        ("allowed_models", None, "", "none"),
        ("dry_run", False, "", "no"),
        ("revoked_at", "2026-11-24T11:14:16.066Z", "", "24 Nov 2026, 11:14"),
        ("revoked_at", "2026-99-24T11:14", "", "2026-99-24T11:14"),
        ("mode", "dry_run", "", "dry run"),
        ("name", "dry_run", "", "dry_run"),
        ("body", {"rules": [1]}, "", '{"rules": [1]}'),
        ("key_id", 3, "", "prod"),
        ("key_id", 4, "", "ID 4"),
    ],
)
def test_values_have_units(field: str, value: Any, unit: str, text: str) -> None:
    assert value_text(field, value, {(ApiKey, 3): "prod"}, unit) == text


def test_every_audited_field_and_choice_has_a_label():
    audited = {(model, field) for model in apps.get_models() for field in getattr(model, "AUDITED", ())}
    assert len(audited) > 150
    assert {name for _, name in audited} - set(_FIELDS) == set()
    chosen = {
        value
        for model, name in audited
        if name in _WORDS
        for value, _label in getattr(model._meta.get_field(name), "flatchoices", ())
    }
    assert chosen - set(VALUE_LABELS) == {"pagerduty", "slack", "webhook"}  # names


def test_fields_and_values_are_translated():
    with translation.override("de"):
        assert field_label("disabled_because") == "Grund der Deaktivierung"
        assert value_text("invoice_type", "credit_note", {}) == "Gutschrift"
        assert value_text("dry_run", True, {}) == "ja"
        assert value_text("allowed_models", None, {}) == "keine"
        assert value_text("disabled_because", "The endpoint responded with 410 Gone.", {}) == (
            "Der Endpunkt antwortete mit 410 Gone."
        )
