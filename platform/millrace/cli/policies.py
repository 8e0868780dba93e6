"""`millrace policies`: routing policies, their drafts, dry runs and versions."""

from __future__ import annotations

import json
from typing import Any, TextIO

import click

from millrace.cli.app import ResourceGroup, Session, command, given_options
from millrace.cli.output import Column, amount, number
from millrace.cli.row_texts import problem_texts


def _percent(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.1%}"


_BASE_VERSION = "Active version that the change is based on, 0: none; fails if another one is active."
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


@command(policies, "publish", example="millrace policies publish assistant --model smollm2-135m")
@click.argument("name")
@click.option("--file", type=click.File(encoding="utf-8"), metavar="FILE", help="Policy as JSON; -: standard input.")
@click.option("--model", "models", multiple=True, metavar="MODEL", help="Instead of a file; repeat for fallbacks.")
@click.option("--base-version", type=click.IntRange(0), metavar="VERSION", help=_BASE_VERSION)
def publish_policy(
    session: Session, name: str, file: TextIO | None, models: tuple[str, ...], base_version: int | None
) -> None:
    """Publish a new version of the routing policy of a model name."""
    if (file is None) == (not models):
        raise click.UsageError("Give either --file or --model.")
    body = _body(file) if file else {"models": list(models)}
    policy = session.client.policies.publish(name=name, body=body, **given_options({"base_version": base_version}))
    session.done(policy, f"Published version {policy['version']} of {name} ({policy['id']}).")


def _body(file: TextIO) -> dict[str, Any]:
    try:
        body = json.load(file)
    except ValueError as exc:
        raise click.UsageError(f"{file.name} is not JSON: {exc}.") from exc
    if not isinstance(body, dict):
        raise click.UsageError(f'{file.name} is not a policy: give a JSON object such as {{"models": ["a", "b"]}}.')
    return body


@command(policies, "validate", example="millrace policies validate policy.json")
@click.argument("file", type=click.File(encoding="utf-8"))
def validate_policy(session: Session, file: TextIO) -> None:
    """Validate a policy without storing it."""
    result = session.client.policies.validate(body=_body(file))
    if not result["valid"] and not session.as_json:
        raise click.ClickException(f"The policy is not valid: {result['error'].rstrip('.')}.")
    warnings = f" Not available now: {problem_texts(result['problems'])}" if result["problems"] else ""
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
    session.done(found, *lines or ["The versions are equal."])


@command(policies, "save-draft", example="millrace policies save-draft assistant --file policy.json")
@click.argument("name")
@click.option("--file", type=click.File(encoding="utf-8"), metavar="FILE", required=True, help="Policy as JSON.")
def save_draft(session: Session, name: str, file: TextIO) -> None:
    """Save the draft of a policy, in place of an earlier one. Requests do not use it."""
    draft = session.client.policy_drafts.save(name=name, body=_body(file))
    error = f" It is not valid: {draft['error']}." if draft["error"] else ""
    error += f" {problem_texts(draft['problems'])}" if draft["problems"] else ""
    session.done(draft, f"Saved the draft of {name} ({draft['id']}).{error}")
