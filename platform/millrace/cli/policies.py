"""`millrace policies`: routing policies, their drafts, dry runs and versions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

import click

from millrace.cli.app import ResourceGroup, Session, command, given_options
from millrace.cli.output import Column, amount, moment, number, yes_no


def _problems(problems: Iterable[Mapping[str, object]]) -> str:
    """Return models that cannot serve requests, with their places."""
    return " ".join(f"{problem['place']}: {problem['message']}" for problem in problems)


_POLICY = [
    Column("id", "id", right=True),
    Column("name", "name"),
    Column("version", "version", right=True),
    Column("active", "active", yes_no),
    Column("problems", "problems", _problems),
    Column("published", "created_at", moment),
]
_DRAFT = [
    Column("id", "id", right=True),
    Column("name", "name"),
    Column("based on", "based_on", number),
    Column("error", "error"),
    Column("problems", "problems", _problems),
    Column("saved", "updated_at", moment),
]
_POLICY_FIELDS = [*_POLICY, Column("body", "body", lambda body: json.dumps(body, ensure_ascii=False))]


def _percent(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.1%}"


_DRY_RUN = [
    Column("requests", "requests", number),
    Column("undecided", "undecided", number),
    Column("without a rule (404)", "unmatched", number),
    Column("rejected", "rejected", lambda rejected: "; ".join(map(_rejection, rejected))),
    Column("priced", "priced", number),
    Column("cost before", "usd_before", amount),
    Column("cost after", "usd_after", amount),
    Column("TTFT p50 before, ms", "ttft_p50_ms_before", number),
    Column("TTFT p50 after, ms", "ttft_p50_ms_after", number),
    Column("TTFT p95 before, ms", "ttft_p95_ms_before", number),
    Column("TTFT p95 after, ms", "ttft_p95_ms_after", number),
    Column("success rate before", "success_rate_before", _percent),
    Column("success rate after", "success_rate_after", _percent),
    Column("moves", "moves", lambda moves: "; ".join(map(_move, moves))),
]


def _rejection(rejection: dict[str, Any]) -> str:
    return f"{rejection['model']} ({rejection['code']}): {rejection['requests']}"


def _move(move: dict[str, Any]) -> str:
    return f"{move['before']} to {move['after'] or '404'}: {move['requests']}"


@click.group(cls=ResourceGroup)
def policies() -> None:
    """Manage routing policies, the tenant's own model names."""


@command(policies, "list", example="millrace policies list --active", rows=True)
@click.option("--name", metavar="MODEL", help="Only versions of this model name.")
@click.option("--active/--inactive", default=None, help="Only active versions, or only inactive ones.")
def list_policies(session: Session, limit: int, **filters: Any) -> None:
    """List all versions of all routing policies, newest first."""
    session.rows(session.client.policies.list(**given_options(filters)), _POLICY, limit=limit, empty="No policies.")


@command(policies, "show", example="millrace policies show 9 --json")
@click.argument("id", type=int)
def show_policy(session: Session, id: int) -> None:
    """Show a version of a routing policy."""
    session.one(session.client.policies.get(id), _POLICY_FIELDS)


@command(policies, "publish", example="millrace policies publish assistant --model smollm2-135m")
@click.argument("name")
@click.option("--file", type=click.File(encoding="utf-8"), metavar="FILE", help="Policy as JSON; -: standard input.")
@click.option("--model", "models", multiple=True, metavar="MODEL", help="Instead of a file; repeat for fallbacks.")
def publish_policy(session: Session, name: str, file: TextIO | None, models: tuple[str, ...]) -> None:
    """Publish a new version of the routing policy of a model name."""
    if (file is None) == (not models):
        raise click.UsageError("Give either --file or --model.")
    policy = session.client.policies.publish(name=name, body=_body(file) if file else {"models": list(models)})
    session.done(policy, f"Published version {policy['version']} of {name} ({policy['id']}).")


def _body(file: TextIO) -> dict[str, Any]:
    try:
        body = json.load(file)
    except ValueError as exc:
        raise click.UsageError(f"{file.name} is not JSON: {exc}.") from exc
    if not isinstance(body, dict):
        raise click.UsageError(f'{file.name} is not a policy: give a JSON object such as {{"models": ["a", "b"]}}.')
    return body


@command(policies, "revert", example="millrace policies revert 7")
@click.argument("id", type=int)
def revert_policy(session: Session, id: int) -> None:
    """Publish the rules of an earlier version again."""
    policy = session.client.policies.revert(id)
    session.done(policy, f"Published version {policy['version']} of {policy['name']} ({policy['id']}).")


@command(policies, "withdraw", example="millrace policies withdraw 9")
@click.argument("id", type=int)
def withdraw_policy(session: Session, id: int) -> None:
    """Deactivate the routing policy of a model name. Its versions can be published again."""
    session.client.policies.withdraw(id)
    session.done({"id": id, "active": False}, f"Deactivated the policy {id}.")


@command(policies, "validate", example="millrace policies validate policy.json")
@click.argument("file", type=click.File(encoding="utf-8"))
def validate_policy(session: Session, file: TextIO) -> None:
    """Validate a policy without storing it."""
    result = session.client.policies.validate(body=_body(file))
    if not result["valid"] and not session.as_json:
        raise click.ClickException(f"The policy is not valid: {result['error'].rstrip('.')}.")
    warnings = f" Not available now: {_problems(result['problems'])}" if result["problems"] else ""
    session.done(result, f"The policy is valid. Its models are {', '.join(result['models'])}.{warnings}")


@command(policies, "dry-run", example="millrace policies dry-run policy.json --name assistant")
@click.argument("file", type=click.File(encoding="utf-8"))
@click.option("--name", metavar="MODEL", help="Only requests for this model name; default: all.")
@click.option("--requests", type=click.IntRange(1, 2000), help="Number of newest requests; default: 500.")
def dry_run_policy(session: Session, file: TextIO, **options: Any) -> None:
    """Show the targets that recent requests would have taken, and the difference of their cost."""
    session.one(session.client.policies.dry_run(body=_body(file), **given_options(options)), _DRY_RUN)


@command(policies, "diff", example="millrace policies diff 9 --against 7")
@click.argument("id", type=int)
@click.option("--against", type=int, metavar="ID", help="Older version; default: the previous one.")
def diff_policy(session: Session, id: int, **options: Any) -> None:
    """Show the differences between a version and an older one."""
    found = session.client.policies.diff(id, **given_options(options))
    lines = [f"{line['change']} {line['text']}" for line in found["lines"]]
    session.done(found, "\n".join(lines) or "The versions are equal.")


@command(policies, "drafts", example="millrace policies drafts", rows=True)
def list_drafts(session: Session, limit: int) -> None:
    """List the drafts of routing policies."""
    session.rows(session.client.policy_drafts.list(), _DRAFT, limit=limit, empty="No drafts.")


@command(policies, "save-draft", example="millrace policies save-draft assistant --file policy.json")
@click.argument("name")
@click.option("--file", type=click.File(encoding="utf-8"), metavar="FILE", required=True, help="Policy as JSON.")
def save_draft(session: Session, name: str, file: TextIO) -> None:
    """Save the draft of a policy, in place of an earlier one. Requests do not use it."""
    draft = session.client.policy_drafts.save(name=name, body=_body(file))
    error = f" It is not valid: {draft['error']}." if draft["error"] else ""
    error += f" {_problems(draft['problems'])}" if draft["problems"] else ""
    session.done(draft, f"Saved the draft of {name} ({draft['id']}).{error}")


@command(policies, "publish-draft", example="millrace policies publish-draft 4")
@click.argument("id", type=int)
def publish_draft(session: Session, id: int) -> None:
    """Publish a draft, unless another version was published since it was created."""
    policy = session.client.policy_drafts.publish(id)
    session.done(policy, f"Published version {policy['version']} of {policy['name']} ({policy['id']}).")


@command(policies, "discard-draft", example="millrace policies discard-draft 4")
@click.argument("id", type=int)
def discard_draft(session: Session, id: int) -> None:
    """Discard a draft."""
    session.client.policy_drafts.discard(id)
    session.done({"id": id, "discarded": True}, f"Discarded the draft {id}.")
