"""Forms of a policy: one for each rule and one for the rest. A form's fields become a part of the policy's JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from django import forms
from django.http import QueryDict
from django.utils.dates import WEEKDAYS_ABBR
from django.utils.translation import gettext as _

from frontend.core.languages import lazy_text as _lazy
from tenants.routing_policies.conditions import DAYS, Hours
from tenants.routing_policies.policy import MAX_ESCALATIONS, MAX_NAME_LENGTH, Policy, PolicyTarget, Rule
from tenants.routing_policies.strategies import STRATEGIES

EITHER = (("", _lazy("Any")), ("true", _lazy("Yes")), ("false", _lazy("No")))
STRATEGY_NAMES = {
    "weighted": _lazy("Weighted"),
    "ordered": _lazy("In order"),
    "cheapest": _lazy("Cheapest that fits"),
    "lowest_latency": _lazy("Lowest latency"),
    "least_busy": _lazy("Least busy"),
}
CHECKS = {
    "schema": _lazy("Not valid under the schema"),
    "tool_arguments": _lazy("Invalid tool arguments"),
    "pattern": _lazy("Pattern does not match"),
    "empty": _lazy("Empty answer"),
}
FALLBACKS = {
    "error": _lazy("Worker error"),
    "overload": _lazy("Overload"),
    "rate_limit": _lazy("Rate limit"),
    "context": _lazy("Context overflow"),
    "timeout": _lazy("No token in time"),
}
MAX_TEXT = 8192  # characters of a text field
MAX_DIGITS = 19  # exclusive, of a number that PostgreSQL can store


def _number(label: str, **options: Any) -> forms.IntegerField:
    return forms.IntegerField(label=label, required=False, min_value=0, max_value=2**31, **options)


def _either(label: str) -> forms.ChoiceField:
    return forms.ChoiceField(label=label, required=False, choices=EITHER)


class _TextField(forms.CharField):
    """A text. Its line breaks and outer spaces, which browsers and Django change, are no change by the user."""

    def to_python(self, value: Any) -> Any:
        return super().to_python("\n".join(str(value or "").splitlines()))

    def has_changed(self, initial: Any, data: Any) -> bool:
        return super().has_changed(self.to_python(initial), data)


def _text(label: str, help_text: str = "", *, rows: int = 0, max_length: int = MAX_TEXT) -> forms.CharField:
    attrs = {"spellcheck": "false", "autocomplete": "off"}
    widget = forms.Textarea(attrs | {"rows": rows, "class": "mono"}) if rows else forms.TextInput(attrs)
    return _TextField(label=label, required=False, max_length=max_length, help_text=help_text, widget=widget)


def _boxes(label: str, choices: Mapping[Any, str]) -> forms.MultipleChoiceField:
    return forms.MultipleChoiceField(
        label=label, required=False, choices=list(choices.items()), widget=forms.CheckboxSelectMultiple
    )


class _PartForm(forms.Form):
    """A form of a part of the policy."""

    def is_pending(self) -> bool:
        """Return whether the form has changes that are not in the JSON, which an error or another change prevents."""
        return self.is_bound and self.has_changed()


class RuleForm(_PartForm):
    """A rule. `initial_of` returns the fields of a rule, `rule` the JSON of the fields."""

    name = _text(_lazy("Name"), max_length=MAX_NAME_LENGTH)
    tokens_at_least = _number(_lazy("Prompt tokens, at least"))
    tokens_at_most = _number(_lazy("Prompt tokens, at most"))
    tools = _either(_lazy("Tools"))
    schema = _either(_lazy("Structured output"))
    images = _either(_lazy("Images"))
    task = _text(_lazy("Task labels"), _lazy("Separate labels by commas."))
    metadata = _text(_lazy("Metadata"), _lazy("One field per line: team = a, b"), rows=2)
    keys = _boxes(_lazy("API keys"), {})
    projects = _boxes(_lazy("Projects"), {})
    start = _text(_lazy("From (HH:MM)"), max_length=5)
    end = _text(_lazy("To (HH:MM)"), max_length=5)
    zone = _text(_lazy("Time zone"), max_length=64)
    days = _boxes(_lazy("On"), {day: WEEKDAYS_ABBR[number] for number, day in enumerate(DAYS)})
    budget_at_least = _number(_lazy("Budget left, at least (%)"))
    budget_at_most = _number(_lazy("Budget left, at most (%)"))
    complexity_at_least = _number(_lazy("Complexity, at least"))
    complexity_at_most = _number(_lazy("Complexity, at most"))
    strategy = forms.ChoiceField(label=_lazy("Strategy"), choices=list(STRATEGY_NAMES.items()))
    targets = _text(_lazy("Targets"), _lazy("One model per line, with its weight. Weight 0: only a fallback."), rows=3)
    checks = _boxes(_lazy("Use the next target if the answer fails"), CHECKS)
    pattern = _text(_lazy("Pattern of the answer"), max_length=512)
    escalations = forms.IntegerField(label=_lazy("Escalations"), required=False, min_value=1, max_value=MAX_ESCALATIONS)

    def __init__(self, data: QueryDict | None, keys: Mapping[int, str], projects: Mapping[int, str], **options: Any):
        super().__init__(data, **options)
        for name, known in (("keys", keys), ("projects", projects)):
            # IDs in a policy may be of deleted keys.
            given = [*self.initial.get(name, ()), *(data.getlist(self.add_prefix(name)) if data else ())]
            unknown = {
                int(pk): _("No. %(pk)s") % {"pk": pk}
                for pk in given
                if str(pk).isdecimal() and len(str(pk)) < MAX_DIGITS and int(pk) not in known
            }
            self.fields[name].choices = list({**known, **unknown}.items())  # type: ignore[attr-defined]

    def conditions(self) -> list[forms.BoundField]:
        """Return the fields of the conditions."""
        names = ("tokens_at_least", "tokens_at_most", "tools", "schema", "images", "task", "metadata", "start", "end")
        ranges = [f"{name}_at_{end}" for name in ("budget", "complexity") for end in ("least", "most")]
        return [self[name] for name in (*names, "zone", *ranges)]

    def condition_boxes(self) -> list[forms.BoundField]:
        """Return the conditions with several choices, without those that have none."""
        return [self[name] for name in ("keys", "projects", "days") if self.fields[name].choices]  # type: ignore[attr-defined]

    def routing(self) -> list[forms.BoundField]:
        """Return the fields of the targets."""
        return [self[name] for name in ("name", "strategy", "targets")]

    def escalation(self) -> list[forms.BoundField]:
        """Return the fields of the checks of answers."""
        return [self[name] for name in ("checks", "pattern", "escalations")]

    def rule(self) -> dict[str, Any]:
        """Return the JSON of a valid form. The policy may still be invalid."""
        given = self.cleaned_data
        when: dict[str, Any] = {}
        for name, start in (("prompt_tokens", "tokens"), ("budget_left", "budget"), ("complexity", "complexity")):
            if between := _without_empty(at_least=given[f"{start}_at_least"], at_most=given[f"{start}_at_most"]):
                when[name] = between
        when |= {name: given[name] == "true" for name in ("tools", "schema", "images") if given[name]}
        when |= {name: [int(pk) for pk in given[name]] for name in ("keys", "projects") if given[name]}
        if task := _split(given["task"]):
            when["task"] = task
        lines = (line.partition("=") for line in given["metadata"].splitlines() if line.strip())
        if metadata := {name.strip(): _split(values) for name, _, values in lines}:
            when["metadata"] = metadata
        if given["start"] or given["end"]:
            when["hours"] = {"start": given["start"], "end": given["end"]}
            when["hours"] |= _without_empty(zone=given["zone"])
            if given["days"] and len(given["days"]) < len(DAYS):
                when["hours"]["days"] = given["days"]
        rule: dict[str, Any] = _without_empty(name=given["name"], when=when)
        if given["strategy"] != STRATEGIES[0]:
            rule["strategy"] = given["strategy"]
        rule["targets"] = [_target(line) for line in given["targets"].splitlines() if line.strip()]
        if given["checks"]:
            rule["escalate"] = {"on": given["checks"]}
            rule["escalate"] |= _without_empty(pattern=given["pattern"], max=given["escalations"])
        return rule


class PolicyForm(_PartForm):
    """The fields of a policy without its rules."""

    fallback_on = _boxes(_lazy("Fall back before the first token on"), FALLBACKS)
    first_token_ms = _number(_lazy("Time to the first token (ms)"))
    max_per_request = _number(_lazy("Fallbacks per request"))
    max_percent = _number(_lazy("Fallbacks per 100 requests"))
    context_overflow = forms.ChoiceField(
        label=_lazy("Conversations that outgrow the context"),
        choices=(
            ("refuse", _lazy("Reject")),
            ("drop_middle", _lazy("Drop messages in the middle")),
            ("summarize", _lazy("Summarize messages in the middle")),
        ),
    )
    summarizer = _text(_lazy("Model that summarizes"), max_length=128)
    complexity = forms.JSONField(required=False, widget=forms.HiddenInput)  # the classifier
    semantic_cache = forms.BooleanField(label=_lazy("Serve cached answers to similar questions"), required=False)
    shadow_model = _text(
        _lazy("Shadow model"), _lazy("Also answers a share of requests, for comparison only."), max_length=128
    )
    shadow_percent = forms.IntegerField(
        label=_lazy("Requests with a shadow (%)"), required=False, min_value=1, max_value=100
    )

    def policy(self) -> dict[str, Any]:
        """Return the JSON of a valid form."""
        given = self.cleaned_data
        found: dict[str, Any] = {"fallback_on": given["fallback_on"]}
        found |= _without_empty(first_token_ms=given["first_token_ms"])
        retries = {name: given[name] for name in ("max_per_request", "max_percent") if given[name] is not None}
        if retries:
            found["retries"] = retries
        if given["complexity"]:
            found["complexity"] = given["complexity"]
        if given["context_overflow"] != "refuse":
            found["context_overflow"] = given["context_overflow"]
        found |= _without_empty(summarizer=given["summarizer"])
        if given["semantic_cache"]:
            found["semantic_cache"] = True
        if shadow := _without_empty(model=given["shadow_model"], percent=given["shadow_percent"]):
            found["shadow"] = {"percent": 100, **shadow}
        return found


def rule_initial(rule: Rule) -> dict[str, Any]:
    """Return the fields of a rule."""
    when, escalate, either = rule.when, rule.escalate, {None: "", True: "true", False: "false"}
    hours = when.hours or Hours("", "", "")
    tokens, budget, complexity = when.prompt_tokens, when.budget_left, when.complexity
    return {
        "name": rule.name,
        "tokens_at_least": tokens and (tokens.at_least or None),
        "tokens_at_most": tokens and tokens.at_most,
        **{name: either[getattr(when, name)] for name in ("tools", "schema", "images")},
        "task": ", ".join(when.task or ()),
        "metadata": "\n".join(f"{name} = {', '.join(values)}" for name, values in (when.metadata or {}).items()),
        "keys": list(when.keys or ()),
        "projects": list(when.projects or ()),
        **{"start": hours.start, "end": hours.end, "zone": hours.zone},
        "days": list(when.hours.days) if when.hours else [],
        "budget_at_least": budget and (budget.at_least or None),
        "budget_at_most": budget and budget.at_most,
        "complexity_at_least": complexity and (complexity.at_least or None),
        "complexity_at_most": complexity and complexity.at_most,
        "strategy": rule.strategy,
        "targets": "\n".join(_target_line(target) for target in rule.targets),
        "checks": list(escalate.on) if escalate else [],
        "pattern": escalate.pattern if escalate else "",
        "escalations": escalate.max if escalate else None,
    }


def policy_initial(policy: Policy) -> dict[str, Any]:
    """Return the fields of a policy without its rules."""
    given = msgspec.to_builtins(policy.retries)
    return {
        "fallback_on": list(policy.fallback_on),
        "first_token_ms": policy.first_token_ms,
        "max_per_request": given.get("max_per_request"),
        "max_percent": given.get("max_percent"),
        "context_overflow": policy.context_overflow,
        "summarizer": policy.summarizer,
        "complexity": None if policy.complexity is None else msgspec.to_builtins(policy.complexity),
        "semantic_cache": policy.semantic_cache,
        "shadow_model": policy.shadow.model if policy.shadow else "",
        "shadow_percent": policy.shadow.percent if policy.shadow else None,
    }


def _target(line: str) -> dict[str, Any]:
    """Return a target from a line such as `model 9`. A weight that is no number stays a text, which is an error."""
    model, _, weight = line.strip().rpartition(" ")
    if not model:
        return {"model": weight}
    is_number = weight.isascii() and weight.isdigit() and len(weight) < MAX_DIGITS
    return {"model": model.strip(), "weight": int(weight) if is_number else weight}


def _target_line(target: PolicyTarget) -> str:
    return target.model if target.weight == 1 else f"{target.model} {target.weight}"


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _without_empty(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, "", {}, [])}


def move(rules: list[Any], source: int, target: int) -> list[Any]:
    """Return the rules with one of them moved to another index."""
    rules = list(rules)
    if 0 <= source < len(rules):
        rule = rules.pop(source)
        rules.insert(max(0, min(target, len(rules))), rule)
    return rules


def errors_of(forms_: Iterable[forms.Form]) -> bool:
    """Return whether one of the forms is invalid."""
    return any([not form.is_valid() for form in forms_])
