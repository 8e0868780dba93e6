"""The editor of a policy: its rules as rows, and its JSON beside them. Each is made from the other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from django.db.models import Value
from django.http import QueryDict
from django.utils.translation import gettext as _

from frontend.core.page_context import PageContext
from frontend.tenant.routing import page, positions
from frontend.tenant.routing.positions import PolicyError
from frontend.tenant.routing.rule_forms import PolicyForm, RuleForm, errors_of, move, policy_initial, rule_initial
from tenants.models import ApiKey, Project
from tenants.routing_policies.diffs import pretty
from tenants.routing_policies.policy import MAX_RULES, Policy, Rule

NEW_RULE = {"name": "New rule", "when": {"prompt_tokens": {"at_most": 1000}}}
MAX_CHOICES = 200  # API keys and projects


@dataclass
class RuleRow:
    """A rule with its form."""

    index: int
    text: dict[str, Any]  # in words
    form: RuleForm
    change: str  # since the active version
    requests: int | None = None  # of the dry run


@dataclass
class PolicyEditor:
    """The rows of a policy. Without rows, its JSON is invalid."""

    text: str
    rows: list[RuleRow] = field(default_factory=list)
    policy: PolicyForm | None = None
    has_errors: bool = False  # fields of rows are invalid, and the JSON is that before the change


def submitted_text(ctx: PageContext) -> tuple[str, list[RuleForm], PolicyForm | None]:
    """Return the JSON of a submitted editor, and its forms if one of them is invalid.

    The JSON field counts, unless a rule was changed in its row or an order button was used.
    """
    post = ctx.request.POST
    text = post.get("body", "")
    if post.get("source") != "rules" and "op" not in post:
        return text, [], None
    if not (count := _count(post)):
        return text, [], None
    with ctx.scope():
        keys, projects = choices(ctx)
    forms = [RuleForm(post, keys, projects, prefix=f"r{number}") for number in range(count)]
    policy_form = PolicyForm(post, prefix="p")
    if errors_of([*forms, policy_form]):
        return text, forms, policy_form
    rules = changed([form.rule() for form in forms], post.get("op", ""))
    return pretty({"rules": rules, **policy_form.policy()}), [], None


def changed(rules: list[dict[str, Any]], op: str) -> list[dict[str, Any]]:
    """Return the rules after an operation such as `move:2:0`, `remove:1` or `add`."""
    name, *given = op.split(":")
    numbers = [int(number) for number in given if number.isascii() and number.isdigit() and len(number) < 4]
    if name == "move" and len(numbers) == 2:
        return move(rules, *numbers)
    if name == "remove" and len(numbers) == 1 and numbers[0] < len(rules) and len(rules) > 1:
        return [rule for index, rule in enumerate(rules) if index != numbers[0]]
    if name == "add" and len(rules) < MAX_RULES:
        targets = rules[-1]["targets"] if rules else []
        return [*rules[:-1], {**NEW_RULE, "targets": targets}, *rules[-1:]]
    return rules


def open_editor(
    ctx: PageContext,
    text: str,
    forms: list[RuleForm],
    policy_form: PolicyForm | None,
    active: Mapping[str, Any] | None,
) -> PolicyEditor:
    """Return the editor of a text, compared with the body of the active version. Call inside `ctx.scope()`."""
    found = positions.read(text)
    if isinstance(found, PolicyError):
        parsed = _lenient(text)
        if parsed is None:
            return PolicyEditor(text)
    else:
        parsed = found[1]
    keys, projects = choices(ctx)
    words, active_rules = page.in_words(ctx, parsed), _rules_of(active or {})
    rows = [
        RuleRow(
            index,
            words.rules[index],
            forms[index]
            if index < len(forms)
            else RuleForm(None, keys, projects, prefix=f"r{index}", initial=rule_initial(rule)),
            _change(rule, index, active_rules) if active else "",
        )
        for index, rule in enumerate(parsed.rules)
    ]
    return PolicyEditor(text, rows, policy_form or PolicyForm(prefix="p", initial=policy_initial(parsed)), bool(forms))


def choices(ctx: PageContext) -> tuple[dict[int, str], dict[int, str]]:
    """Return the names of the tenant's API keys and projects by ID. Call inside `ctx.scope()`."""
    keys = ApiKey.objects.for_tenant(ctx.tenant).filter(revoked_at=None).annotate(kind=Value("key"))
    projects = Project.objects.for_tenant(ctx.tenant).annotate(kind=Value("project"))
    columns = ("kind", "pk", "name")
    rows = keys.values_list(*columns).union(projects.values_list(*columns)).order_by("kind", "name")[:MAX_CHOICES]
    found: dict[str, dict[int, str]] = {"key": {}, "project": {}}
    for kind, pk, name in rows:
        found[kind][pk] = name
    return ctx.once("names of keys", lambda: found["key"]), found["project"]


def _lenient(text: str) -> Policy | None:
    """Return the policy of a text that has the right types but invalid values, such as a wrong time; else None."""
    try:
        return msgspec.convert(json.loads(text), Policy)
    except (ValueError, RecursionError):
        return None


def _rules_of(body: Mapping[str, Any]) -> tuple[Rule, ...]:
    found = positions.read(json.dumps(body))
    return () if isinstance(found, PolicyError) else found[1].rules


def _change(rule: Rule, index: int, active: tuple[Rule, ...]) -> str:
    """Return how a rule differs from the active version."""
    if rule in active:
        return ""
    names = {other.name for other in active if other.name}
    is_known = rule.name in names if rule.name else index < len(active)
    return _("Changed") if is_known else _("Added")


def _count(post: QueryDict) -> int:
    count = post.get("rules", "")
    return min(int(count), MAX_RULES) if count.isascii() and count.isdigit() and len(count) < 4 else 0
