"""The form of an alert rule: a sentence whose words are fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from django import forms
from django.utils.translation import gettext as _

from billing.currencies.amounts import NANO_DIGITS
from frontend.core.languages import lazy_text as _lazy
from frontend.core.plain_text_field import PLAIN_TEXT
from frontend.tenant.alerts.rules import (
    ALL_MODELS,
    ALL_PROJECTS,
    SENTENCES,
    WINDOWS,
    money_text,
    percent_text,
    words_of,
)
from frontend.tenant.budgets.amounts import parse
from millrace.apps.alerts.actions import DEFAULT_MIN_REQUESTS, DEFAULT_WINDOW, MAX_MIN_REQUESTS, THRESHOLDS
from millrace.apps.alerts.models import AlertRule

Metric = AlertRule.Metric
_NUMBER = {**PLAIN_TEXT, "inputmode": "decimal"}
_FIELD = re.compile(r"\{(\w+)\}")
_PERCENT = re.compile(r"([0-9]{1,2})(?:[.,]([0-9]{1,2}))?", re.ASCII)
_DEFAULTS = {
    Metric.ERROR_RATE: 500,
    Metric.TTFT_P95: 2000,
    Metric.KEY_EXPIRY: 14,
    Metric.CREDIT: 10 * 10**NANO_DIGITS,
    Metric.REPLICA_DOWN: 1,
    Metric.DEPLOYMENT_DOWN: 1,
    Metric.UPSTREAM_DOWN: 1,
}


class AlertRuleForm(forms.Form):
    """The values of a rule that can be changed. `fixed` are the words of the sentence that cannot."""

    threshold = forms.CharField(label=_lazy("Threshold"), max_length=20, widget=forms.TextInput(_NUMBER))

    def __init__(self, metric: Metric, data: Any = None, rule: AlertRule | None = None, initial: Any = None) -> None:
        super().__init__(data, initial=initial)
        self.metric = metric
        self.fixed: dict[str, str] = {} if rule is None else words_of(rule)
        self.initial.setdefault("threshold", _input_text(metric, rule.threshold if rule else _DEFAULTS[metric]))
        if metric in AlertRule.OF_REQUESTS:
            window = rule.window_minutes if rule else DEFAULT_WINDOW
            self.fields["window"] = forms.TypedChoiceField(
                label=_("Window"), choices=WINDOWS, coerce=int, initial=window
            )
            self.fields["min_requests"] = forms.IntegerField(
                label=_("Minimum requests"),
                min_value=1,
                max_value=MAX_MIN_REQUESTS,
                initial=rule.min_requests if rule else DEFAULT_MIN_REQUESTS,
                widget=forms.TextInput({**PLAIN_TEXT, "inputmode": "numeric"}),
            )

    def parts(self) -> Iterator[dict[str, Any]]:
        """Yield the texts and fields of the sentence in the order of the language."""
        for number, part in enumerate(_FIELD.split(str(SENTENCES[self.metric]))):
            if number % 2 == 0:
                yield {"text": part}
            elif part in self.fields:
                yield {"field": self[part]}
            else:
                yield {"fixed": self.fixed.get(part, "")}

    def clean_threshold(self) -> int:
        text = self.cleaned_data["threshold"]
        try:
            value = _parse_percent(text) if self.metric == Metric.ERROR_RATE else parse(text, self._unit())
        except ValueError as exc:
            raise forms.ValidationError(str(exc)) from exc
        least, most, _unit = THRESHOLDS[self.metric]
        if not least <= value <= most:
            bounds = {"least": _input_text(self.metric, least), "most": _input_text(self.metric, most)}
            raise forms.ValidationError(_("Enter a number from %(least)s to %(most)s.") % bounds)
        return value

    def _unit(self) -> str:
        return "money" if self.metric == Metric.CREDIT else "requests"

    def chosen(self) -> dict[str, Any]:
        """Return the values as arguments of the actions on rules."""
        names = {"threshold": "threshold", "window": "window_minutes", "min_requests": "min_requests"}
        return {names[name]: self.cleaned_data[name] for name in names if name in self.cleaned_data}


class NewAlertRule(AlertRuleForm):
    """A new rule, with its scope, which cannot be changed later."""

    def __init__(
        self,
        metric: Metric,
        data: Any = None,
        *,
        projects: Sequence[tuple[int, str]] = (),
        models: Sequence[str] = (),
        tenants: Sequence[tuple[int, str]] = (),
    ) -> None:
        super().__init__(metric, data)
        names = _FIELD.findall(str(SENTENCES[metric]))
        if "project" in names:
            choices = [("", ALL_PROJECTS), *((str(pk), name) for pk, name in projects)]
            self.fields["project"] = forms.ChoiceField(label=_("Project"), required=False, choices=choices)
        if "model" in names:
            options = [("", ALL_MODELS), *((name, name) for name in models)]
            self.fields["model"] = forms.ChoiceField(label=_("Model"), required=False, choices=options)
        if "tenant" in names:
            receivers = [(str(pk), name) for pk, name in tenants]
            self.fields["tenant"] = forms.ChoiceField(label=_("Recipient"), choices=receivers)


def _parse_percent(text: str) -> int:
    """Return hundredths of a percent.

    Raises:
        ValueError: the text is not a percentage below 100. The message is shown to the user.
    """
    found = _PERCENT.fullmatch(text.strip().removesuffix("%").strip())
    if found is None:
        raise ValueError(_("Enter a percentage below 100, e.g. 5 or 0.5"))
    return int(found[1]) * 100 + int((found[2] or "").ljust(2, "0"))


def _input_text(metric: Metric, value: int) -> str:
    if metric == Metric.CREDIT:
        return money_text(value)
    return percent_text(value) if metric == Metric.ERROR_RATE else str(value)
