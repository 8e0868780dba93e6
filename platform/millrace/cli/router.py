"""`millrace router`: training of the complexity classifier of routing policies."""

from __future__ import annotations

import gzip
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from inference_worker.contract.command_line import format_command
from millrace.cli import output
from millrace.cli.app import ApiCommand, ResourceGroup, Session, command, fail, given_options, server_packages
from millrace.cli.plain_commands import instant

MAX_OUTCOMES = 200_000


@click.group(cls=ResourceGroup)
def router() -> None:
    """Train the complexity classifier of routing policies."""


@command(
    router,
    "outcomes",
    example="millrace router outcomes assistant --weak small --strong large --from 2026-11-01",
)
@click.argument("name")
@click.option("--weak", required=True, metavar="MODEL", help="Model of simple requests.")
@click.option("--strong", required=True, metavar="MODEL", help="Model of complex requests.")
@click.option("--from", "from_", metavar="TIME", help="Start, inclusive; default: a day before the end.")
@click.option("--to", metavar="TIME", help="End, exclusive; default: now.")
def print_outcomes(session: Session, name: str, **options: Any) -> None:
    """Print stored prompts with feedback on requests for a model name, as JSON lines for `millrace router train`.

    A rule with the strategy `weighted` must have drawn the model of each request, so that training is not biased.
    """
    options |= {name: instant(options[name]) for name in ("from_", "to")}
    for outcome in session.client.requests.outcomes(model=name, **given_options(options))["outcomes"]:
        click.echo(json.dumps({key: value for key, value in outcome.items() if value is not None}, ensure_ascii=False))


class _TrainCommand(ApiCommand):
    example = "millrace router train outcomes.jsonl --weak small --strong large --out policy.json"


@router.command("train", cls=_TrainCommand)
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--weak", required=True, metavar="MODEL", help="Model of simple requests.")
@click.option("--strong", required=True, metavar="MODEL", help="Model of complex requests.")
@click.option(
    "--quality",
    type=click.FloatRange(0.5, 1, max_open=True),
    default=0.95,
    show_default=True,
    help="Least share of the strong model's success rate that the policy reaches.",
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write the policy.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def train(file: Path, weak: str, strong: str, quality: float, out: Path | None, as_json: bool) -> None:
    """Train a classifier on labeled outcomes and write a routing policy with it.

    FILE has a JSON object per line, with `prompt`, `weak_ok` and `strong_ok`, or only one of them if a random draw has
    selected the model. It may be compressed (.gz). A part of the
    outcomes calibrates the threshold: with 95% confidence, the policy reaches the quality on requests like these.
    """
    with server_packages():
        from tenants.routing_policies.complexity_training import policy_of
        from tenants.routing_policies.complexity_training import train as train_classifier
    try:
        model, calibration = train_classifier(list(_outcomes(file)), quality)
    except (OSError, ValueError, EOFError) as exc:
        fail(f"{file}: {exc}")
    policy = policy_of(model, calibration, weak, strong)
    if out is not None:
        out.write_text(json.dumps(policy, indent=2) + "\n", encoding="utf-8")
    found: dict[str, Any] = {
        "threshold": calibration.threshold,
        "strong_share": round(calibration.strong_share, 4),
        "quality": round(calibration.quality, 4),
        "calibration_outcomes": calibration.outcomes,
    }
    if as_json:
        output.print_json({**found, "policy": policy})
        return
    if calibration.threshold is None:
        click.echo(f"No threshold reaches the quality {quality:g} with confidence. All requests use {strong}.")
    else:
        click.echo(
            f"Complexity of {calibration.threshold} or more uses {strong}: {calibration.strong_share:.1%} of "
            f"{calibration.outcomes:,} calibration outcomes, at {calibration.quality:.1%} of its success rate."
        )
    if out is not None:
        publishing = format_command(f"policies publish NAME --file {shlex.quote(str(out))}")
        click.echo(f"Wrote {out}. Publish it with: {publishing}")


def _outcomes(file: Path) -> Iterator[Any]:
    import msgspec

    from tenants.routing_policies.complexity_training import Outcome

    decoder = msgspec.json.Decoder(Outcome)
    with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if number > MAX_OUTCOMES:
                raise ValueError(f"it has more than {MAX_OUTCOMES:,} lines; use a sample")
            if not line.strip():
                continue
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as exc:
                raise ValueError(f"line {number}: {exc}") from exc
