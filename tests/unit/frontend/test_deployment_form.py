"""The form for deployments: the options of an existing deployment stay as they are, and invalid values are errors."""

from __future__ import annotations

from typing import Any

from frontend.operator.deployments.forms import DeploymentForm, UpstreamForm
from frontend.operator.deployments.wizard_forms import FieldGroups
from millrace.apps.deployments.models import Deployment


def form(**changes: Any) -> DeploymentForm:
    row = Deployment(name="own", source="embedded", state="loaded", pools={"default": 1}, idle_seconds=30)
    values = {name: value for name, value in DeploymentForm(row=row).initial.items() if value is not None}
    return DeploymentForm(values | changes, row)


def test_an_unchanged_form_keeps_an_idle_time_below_a_minute() -> None:
    unchanged = form()
    assert unchanged.is_valid(), unchanged.errors
    assert unchanged.cleaned_data["idle_seconds"] == 30
    blank = form(idle_seconds="")
    assert blank.is_valid(), blank.errors
    assert blank.cleaned_data["idle_seconds"] == 0


def test_a_number_of_replicas_that_is_no_decimal_number_is_an_error() -> None:
    wrong = form(pools="default=²")
    assert not wrong.is_valid()
    assert "pools" in wrong.errors


def test_a_box_that_is_not_checked_turns_truncation_off() -> None:
    for value, truncates in (("on", True), (False, False)):
        changed = form(truncate_inputs=value)
        assert changed.is_valid(), changed.errors
        assert changed.cleaned_data["truncate_inputs"] is truncates
    assert DeploymentForm().fields["truncate_inputs"].initial is True
    assert "truncate_inputs" not in UpstreamForm().fields


def test_the_field_groups_of_the_wizard_have_the_errors_of_its_action() -> None:
    submitted = form()
    groups = FieldGroups(submitted, ("source", "pools"))
    assert [bound.name for bound in groups.shown.visible_fields] == ["source", "pools"]
    assert not groups.is_open
    submitted.add_error(None, "refused")
    assert groups.shown.non_field_errors == ["refused"]
    assert not groups.is_open
    submitted.add_error("revision", "wrong")
    assert groups.is_open
    assert FieldGroups(form(revision="v7"), ("source", "pools")).is_open  # a folded field was changed
