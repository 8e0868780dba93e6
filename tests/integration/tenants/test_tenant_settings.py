"""Each declaration of a tenant's setting, in the column, the API, the forms, the audit log and the key snapshots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from frontend.core.audit_words import action_label
from frontend.tenant.settings import views
from tenants import actions, tenant_settings
from tenants.api.serializers import TenantSerializer, TenantUpdateSerializer
from tenants.keys.snapshot import ApiKeySnapshot, decode
from tenants.models import ApiKeySnapshotRow, Tenant
from tenants.models.tenancy import setting_constraints, setting_options
from tenants.tenant_settings import GROUPS, SETTINGS, TenantSetting
from tests.support.rows import of, only_project

CHANGED: dict[str, Any] = {
    "content_retention_days": 7,
    "unknown_parameters": "reject",
    "allowed_origins": ["https://app.example"],
    "answer_cache_seconds": 60,
    "answer_cache_sampled": True,
    "answer_cache_scope": "project",
    "semantic_cache_max_error_percent": 5,
    "cache_warming_nano": 1_000,
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_a_column_has_the_declared_default_texts_and_constraint(setting: TenantSetting) -> None:
    column = Tenant._meta.get_field(setting.name)
    assert column.get_default() == (list(setting.default) if isinstance(setting.default, tuple) else setting.default)
    assert column.help_text == setting.description
    assert dict(column.choices or ()) == dict(setting.choices or {})
    assert setting.name in Tenant.AUDITED
    conditions = [str(constraint.condition) for constraint in Tenant._meta.constraints]
    found = [condition for condition in conditions if f"'{setting.name}__" in condition]
    if setting.maximum is not None:
        assert found == [f"(AND: ('{setting.name}__range', (0, {setting.maximum})))"]
    elif setting.choices is not None:
        assert found == [f"(AND: ('{setting.name}__in', {list(setting.choices)}))"]
    else:
        assert found == []


def test_the_api_has_each_setting() -> None:
    assert set(TenantUpdateSerializer().fields) == {"name", *SETTINGS}
    assert set(TenantSerializer().fields) >= set(SETTINGS)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_the_form_of_a_group_has_the_settings_with_labels(group: Any) -> None:
    shown = {setting.name: setting for setting in GROUPS[group] if setting.label}
    fields = views.GroupForm(group, Tenant(), None).fields
    assert {name: (field.label, field.help_text) for name, field in fields.items()} == {
        name: (setting.label, setting.hint) for name, setting in shown.items()
    }
    assert action_label(f"tenant.{group.name}_updated") == f"Organization {group.audit_verb}"


def test_a_new_declaration_is_in_each_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declare a setting, and find it without a change elsewhere, except in the columns and snapshots."""
    new = replace(
        SETTINGS["semantic_cache_max_error_percent"],
        name="max_widgets",
        default=3,
        maximum=12,
        description="number of widgets",
        help="Number of widgets.",
        label="Widgets",
    )
    monkeypatch.setitem(SETTINGS, new.name, new)
    monkeypatch.setitem(GROUPS, new.group, (*GROUPS[new.group], new))
    options = setting_options(new.name)
    assert options == {"default": 3, "db_default": 3, "help_text": "number of widgets"}
    names = {constraint.name for constraint in setting_constraints()}
    assert "tenant_max_widgets" in names
    field = TenantUpdateSerializer().fields[new.name]
    assert (field.min_value, field.max_value, field.help_text) == (0, 12, "Number of widgets.")
    tenant = Tenant()
    tenant.max_widgets = 4
    shown = views.GroupForm(new.group, tenant, None)
    assert (shown.fields[new.name].label, shown.fields[new.name].max_value) == ("Widgets", 12)
    assert tenant_settings.problem(new, 13) == "max_widgets must be from 0 to 12."


def test_defaults_of_snapshots_are_the_declared_ones() -> None:
    defaults = dict(
        zip(
            ApiKeySnapshot.__struct_fields__[-len(ApiKeySnapshot.__struct_defaults__) :],
            ApiKeySnapshot.__struct_defaults__,
            strict=True,
        )
    )
    in_snapshots = SETTINGS.keys() & defaults.keys()
    assert SETTINGS.keys() - in_snapshots == {"cache_warming_nano"}
    for name in in_snapshots - {"unknown_parameters"}:
        assert defaults[name] == SETTINGS[name].default
    assert defaults["unknown_parameters"] is None  # the platform's


@pytest.mark.django_db
def test_snapshots_have_the_values_of_settings(acme: Tenant) -> None:
    assert CHANGED.keys() == SETTINGS.keys()
    actions.do_create_api_key(only_project(acme), "k")
    assert actions.do_update_settings(acme, **CHANGED)
    assert not actions.do_update_settings(acme, **CHANGED)
    (row,) = of(ApiKeySnapshotRow, acme)
    snapshot = decode(bytes(row.payload))
    for name in SETTINGS.keys() & set(ApiKeySnapshot.__struct_fields__):
        value = getattr(snapshot, name)
        assert (list(value) if isinstance(value, tuple) else value) == CHANGED[name]


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"content_retention_days": 91}, "content_retention_days must be from 0 to 90."),
        ({"cache_warming_nano": -1}, "cache_warming_nano must be from 0 to 1,000,000,000,000,000."),
        ({"answer_cache_scope": "key"}, "answer_cache_scope must be one of tenant, project."),
        ({"allowed_origins": ["x"]}, "'x' is not an origin"),
    ],
)
def test_values_out_of_range_are_refused(acme: Tenant, values: dict[str, Any], message: str) -> None:
    with pytest.raises(actions.ActionRefused, match=message):
        actions.do_update_settings(acme, **values)
