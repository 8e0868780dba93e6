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
    requests: int | None = None  # number of requests in the dry run


@dataclass
class PolicyEditor:
    """The rows of a policy. Without rows, its JSON is invalid."""

    text: str
    origin: str  # the JSON that the rows were made from, by which a submission shows what was changed
    rows: list[RuleRow] = field(default_factory=list)
    policy: PolicyForm | None = None
    has_errors: bool = False  # fields of rows are invalid, and the JSON is that before the change
    is_ambiguous: bool = False  # both the rows and the JSON were changed


@dataclass(frozen=True)
class SubmittedEditor:
    """A submitted editor. With forms, its rows could not be made JSON."""

    text: str
    origin: str
    rules: list[RuleForm] = field(default_factory=list)
    policy: PolicyForm | None = None
    is_ambiguous: bool = False

    @classmethod
    def from_text(cls, text: str) -> SubmittedEditor:
        """Return the editor of a text, whose rows were made from it."""
        return cls(text, text)


def read_submitted(ctx: PageContext) -> SubmittedEditor:
    """Return the submitted editor. Its JSON is that of the rows or of the JSON field, depending on which was changed.

    A button can be pressed before the rows and the JSON field show each other's changes. If both were changed, only the
    user can choose between them.
    """
    post = ctx.request.POST
    body = post.get("body", "")
    origin = post.get("origin", body)
    if not (count := _count(post)):
        return _with_operation(body, post.get("op", ""))
    with ctx.scope():
        keys, projects = choices(ctx)
    before = _parse(origin)
    initials = [] if before is None else [rule_initial(rule) for rule in before.rules]
    rules = [
        RuleForm(post, keys, projects, prefix=f"r{number}", initial=initial)
        for number, initial in zip(range(count), [*initials, *[None] * count], strict=False)
    ]
    policy = PolicyForm(post, prefix="p", initial=policy_initial(before) if before else None)
    is_json_changed = body.splitlines() != origin.splitlines()
    if len(initials) == count and not any(form.has_changed() for form in [*rules, policy]):
        return _with_operation(body, post.get("op", ""))
    if post.get("keep") == "json":
        return _with_operation(body, "")
    if errors_of([*rules, policy]):
        return SubmittedEditor(body, origin, rules, policy)
    text = pretty({"rules": [form.rule() for form in rules], **policy.policy()})
    if before and is_json_changed and post.get("keep") != "rules" and _parse(text) != _parse(body):
        return SubmittedEditor(body, origin, rules, policy, is_ambiguous=True)
    return _with_operation(text, post.get("op", ""))


def _with_operation(text: str, op: str) -> SubmittedEditor:
    """Return the editor of a text after an operation on its rules. An invalid text stays as it is."""
    policy = _parse(text)
    if not op or policy is None:
        return SubmittedEditor.from_text(text)
    body = json.loads(text)
    if "models" in body:
        body = {"rules": msgspec.to_builtins(policy.rules)}
    return SubmittedEditor.from_text(pretty({**body, "rules": change_rules(body["rules"], op)}))


def change_rules(rules: list[dict[str, Any]], op: str) -> list[dict[str, Any]]:
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


def open_editor(ctx: PageContext, submitted: SubmittedEditor, active: Mapping[str, Any] | None) -> PolicyEditor:
    """Return the editor, compared with the body of the active version. Call inside `ctx.scope()`."""
    parsed = _parse(submitted.origin)
    if parsed is None:
        return PolicyEditor(submitted.text, submitted.origin)
    keys, projects = choices(ctx)
    words, active_rules = page.in_words(ctx, parsed), _rules_of(active or {})
    rows = [
        RuleRow(
            index,
            words.rules[index],
            submitted.rules[index]
            if index < len(submitted.rules)
            else RuleForm(None, keys, projects, prefix=f"r{index}", initial=rule_initial(rule)),
            _change(rule, index, active_rules) if active else "",
        )
        for index, rule in enumerate(parsed.rules)
    ]
    return PolicyEditor(
        submitted.text,
        submitted.origin,
        rows,
        submitted.policy or PolicyForm(prefix="p", initial=policy_initial(parsed)),
        has_errors=bool(submitted.rules) and not submitted.is_ambiguous,
        is_ambiguous=submitted.is_ambiguous,
    )


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


def _parse(text: str) -> Policy | None:
    """Return the policy of a text with the right types, even if a value is invalid, such as a time; else None."""
    found = positions.read(text)
    if not isinstance(found, PolicyError):
        return found[1]
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
