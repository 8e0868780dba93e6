"""Forms of budgets and rate limits. Amounts are text fields, so that they stay exact."""

from __future__ import annotations

import re
from datetime import date, datetime, time, timedelta, tzinfo
from typing import Any

from django import forms
from django.utils.translation import gettext as _

from billing.models import Budget
from frontend.core.day_field import DayField
from frontend.core.languages import lazy_text as _lazy
from frontend.core.numbers import page_currency
from frontend.core.plain_text_field import PLAIN_TEXT, PlainTextField
from frontend.tenant.budgets.amounts import input_text, parse
from frontend.tenant.budgets.scopes import BudgetOwnerScope
from frontend.tenant.keys.key_limits import NAMES
from millrace.apps.deployments.served_deployments import served_specs
from tenants.models import LIMITS, LimitSet

_NUMBER = {**PLAIN_TEXT, "inputmode": "decimal"}
# The words of the sentence that a budget's form is.
UNITS = (("money", _lazy("spend")), ("tokens", _lazy("tokens")), ("requests", _lazy("requests")))
PERIODS = (("month", _lazy("per month")), ("day", _lazy("per day")), ("lifetime", _lazy("in total")))
MODES = (
    (Budget.Mode.HARD, _lazy("reject requests")),
    (Budget.Mode.SOFT, _lazy("only send alerts")),
    (Budget.Mode.DRY_RUN, _lazy("only count (dry run)")),
)
_ADVERBS = {"month": _lazy("monthly"), "day": _lazy("daily"), "lifetime": _lazy("in total")}
LIMIT_MODES = (
    ("hard", _lazy("Hard limit: reject requests over budget")),
    ("dry_run", _lazy("Dry run: count requests over budget")),
)
BASIC = ("requests_per_minute", "tokens_per_minute", "concurrency")
GROUPS = (  # the advanced limits
    (_lazy("Per day"), ("requests_per_day", "tokens_per_day")),
    (_lazy("Input tokens"), ("input_tokens_per_minute", "input_tokens_per_day")),
    (_lazy("Output tokens"), ("output_tokens_per_minute", "output_tokens_per_day")),
    (_lazy("Per request"), ("max_prompt_tokens", "max_output_tokens")),
    (_lazy("Long prompts"), ("long_prompt_threshold", "long_prompt_concurrency")),
)


def percentages(text: str) -> list[int]:
    """Return the whole percentages of a list as typed. Other words are left out."""
    return [int(word) for word in _words(text[:100]) if word.isascii() and word.isdigit() and len(word) < 5]


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[\s,;%]+", text) if word]


class AmountField(forms.CharField):
    """An amount as text. The form parses it when the unit is known."""

    def __init__(self, **options: Any) -> None:
        super().__init__(max_length=40, widget=forms.TextInput(_NUMBER), **options)


class BudgetForm(forms.Form):
    """The settings of a budget that can be changed. `unit` is the unit of its amounts."""

    name = PlainTextField(max_length=100)
    amount = AmountField(label=_lazy("Limit"))
    mode = forms.ChoiceField(label=_lazy("When the limit is reached"), choices=MODES, initial=Budget.Mode.HARD)
    reduce_max_tokens = forms.BooleanField(
        required=False,
        label=_lazy("Reduce max_tokens to fit instead of rejecting"),
        help_text=_lazy("Shortens responses to the remaining budget"),
    )
    rollover_limit = AmountField(
        required=False,
        label=_lazy("Rollover cap"),
        help_text=_lazy("Unused budget carried into the next period. Leave blank for none."),
    )
    thresholds = PlainTextField(
        required=False,
        max_length=100,
        initial="50, 80, 100",
        label=_lazy("Alert thresholds (% of limit)"),
    )
    alert_forecast = forms.BooleanField(
        required=False, initial=True, label=_lazy("Alert when the monthly forecast exceeds the limit")
    )

    def __init__(self, data: Any = None, budget: Budget | None = None, initial: Any = None) -> None:
        super().__init__(data, initial=(_of_budget(budget) if budget else {}) | (initial or {}))
        self._unit = budget.unit if budget else ""

    def unit(self) -> str:
        return self._unit

    def clean(self) -> dict[str, Any]:
        data = super().clean() or {}
        for name in ("amount", "rollover_limit"):
            if name in data and self.unit():
                try:
                    data[name] = parse(data[name], self.unit()) if data[name] else 0
                except ValueError as exc:
                    self.add_error(name, str(exc))
        return data

    def clean_thresholds(self) -> list[int]:
        found = percentages(self.cleaned_data["thresholds"])
        if len(found) != len(_words(self.cleaned_data["thresholds"])):
            raise forms.ValidationError(_("Enter whole percentages, e.g. 50, 80, 100"))
        return found

    def chosen(self) -> dict[str, Any]:
        """Return the values as arguments of the budget actions."""
        names = ("name", "amount", "mode", "reduce_max_tokens", "rollover_limit", "thresholds", "alert_forecast")
        return {name: self.cleaned_data[name] for name in names}


class NewBudget(BudgetForm):
    """A new budget, with the owner, the unit and the period, which cannot be changed later."""

    name = PlainTextField(
        required=False,
        max_length=100,
        help_text=_lazy("Leave blank for a name from the sentence."),
    )
    owner = forms.ChoiceField(label=_lazy("Applies to"))
    counts = forms.ChoiceField(label=_lazy("Measure"), choices=UNITS)
    period = forms.ChoiceField(label=_lazy("Resets"), choices=PERIODS)

    def __init__(self, owners: dict[str, BudgetOwnerScope], data: Any = None, initial: Any = None) -> None:
        super().__init__(data, initial=initial)
        self._owners = owners
        self.fields["owner"].choices = [(value, owner.label) for value, owner in owners.items()]  # type: ignore[attr-defined]

    def unit(self) -> str:
        return str(self.cleaned_data.get("counts", ""))

    def chosen(self) -> dict[str, Any]:
        data = self.cleaned_data
        default = f"{self._owners[data['owner']].label[:80]}, {_ADVERBS[data['period']]}"
        return super().chosen() | {
            "name": data["name"] or default,
            "unit": data["counts"],
            "period": data["period"],
        }


class RaiseForm(forms.Form):
    """A temporary raise of a budget."""

    more = AmountField(label=_lazy("Raise by"))
    until = DayField(label=_lazy("Until"), help_text=_lazy("The limit then reverts."))

    def __init__(self, unit: str, zone: tzinfo, data: Any = None, initial: Any = None) -> None:
        super().__init__(data, initial=initial)
        self._unit, self._zone = unit, zone
        if unit == "money":
            self.fields["more"].help_text = _("In %(currency)s.") % {"currency": page_currency()}

    def clean_more(self) -> int:
        try:
            value = parse(self.cleaned_data["more"], self._unit)
        except ValueError as exc:
            raise forms.ValidationError(str(exc)) from exc
        if not value:
            raise forms.ValidationError(_("Enter an amount greater than zero."))
        return value

    def clean_until(self) -> datetime:
        day: date = self.cleaned_data["until"]
        end = datetime.combine(day + timedelta(days=1), time(), self._zone)
        if end <= datetime.now(self._zone):
            raise forms.ValidationError(_("Choose today or a later date."))
        return end


class LimitsForm(forms.Form):
    """A set of rate limits, each of them optional."""

    mode = forms.ChoiceField(
        label=_lazy("When a limit is reached"), choices=LIMIT_MODES, initial="hard", widget=forms.RadioSelect
    )

    def __init__(self, data: Any = None, row: LimitSet | None = None, initial: Any = None) -> None:
        super().__init__(data, initial=_of_limits(row) if row else initial)
        for name in LIMITS:
            self.fields[name] = AmountField(label=NAMES[name], required=False)

    def basic(self) -> list[Any]:
        """Return the fields that most limits need."""
        return [self[name] for name in BASIC]

    def group_limits(self) -> list[tuple[str, list[Any]]]:
        """Return the fields of the other limits in groups with a label."""
        return [(label, [self[name] for name in names]) for label, names in GROUPS]

    def is_advanced(self) -> bool:
        """Return true if an advanced field has a value or an error, so that it must be shown."""
        names = [name for _, group in GROUPS for name in group]
        return self["mode"].value() == "dry_run" or any(self[name].value() or self[name].errors for name in names)

    def clean(self) -> dict[str, Any]:
        data = super().clean() or {}
        for name in LIMITS:
            if name in data:
                try:
                    data[name] = parse(data[name], "requests") if data[name] else None
                except ValueError as exc:
                    self.add_error(name, str(exc))
        return data

    def limits(self) -> dict[str, int | None]:
        return {name: self.cleaned_data[name] for name in LIMITS}

    def is_dry_run(self) -> bool:
        return bool(self.cleaned_data["mode"] == "dry_run")


class NewLimits(LimitsForm):
    """New rate limits, with the owner and the model, which cannot be changed later."""

    owner = forms.ChoiceField(label=_lazy("Applies to"))
    model = forms.ChoiceField(label=_lazy("Models"), required=False)

    def __init__(self, owners: dict[str, BudgetOwnerScope], data: Any = None, initial: Any = None) -> None:
        super().__init__(data, initial=initial)
        self.fields["owner"].choices = [(value, owner.label) for value, owner in owners.items()]  # type: ignore[attr-defined]
        models = [(model.name, _("%(name)s only") % {"name": model.name}) for model in served_specs()]
        self.fields["model"].choices = [("", _("All models")), *models]  # type: ignore[attr-defined]


def _of_budget(budget: Budget) -> dict[str, Any]:
    return {
        "name": budget.name,
        "amount": input_text(budget.amount, budget.unit),
        "mode": budget.mode,
        "reduce_max_tokens": budget.reduce_max_tokens,
        "rollover_limit": input_text(budget.rollover_limit, budget.unit) if budget.rollover_limit else "",
        "thresholds": ", ".join(map(str, budget.thresholds)),
        "alert_forecast": budget.alert_forecast,
    }


def _of_limits(row: LimitSet) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in LIMITS}
    return {"mode": "dry_run" if row.dry_run else "hard"} | {
        name: "" if value is None else str(value) for name, value in values.items()
    }
