"""`millrace manage price_book`: import, publish and compare prices on the command line."""

from __future__ import annotations

import argparse
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from billing.currencies.amounts import FEMTO_DIGITS
from billing.invoicing.repricing import Comparison, last_month, preview
from billing.metering.usage import instant
from billing.models import PriceBook, PriceVersion
from billing.pricing import demo_prices
from billing.pricing.prices import do_discard_prices, do_price_unpriced, do_propose_prices, do_publish_prices
from billing.rates.price_files import Imported, read_csv, read_public
from tenants.actions.common import ActionRefused
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.management.arguments import tenant_of_slug

_SHOWN = 20  # items shown of each list of what an import left out


class Command(BaseCommand):
    help = (
        "Import price lists, show what they would have cost, and publish them. Prices are in USD a million tokens."
        " An operator at the machine publishes without a second person. `price_book backfill` prices embedded models"
        " that have no price yet."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        reading = actions.add_parser("import", help="draft a version from the public price file (.json) or a CSV")
        reading.add_argument("file", type=Path)
        reading.add_argument("--models", help="only these, with commas (of a .json)")
        reading.add_argument(
            "--round", action="store_true", help="round prices that are not whole nano-USD per million"
        )
        reading.add_argument("--tenant", help="as this tenant's own prices")
        reading.add_argument("--book", default=PriceBook.LIST)
        reading.add_argument("--from", dest="start", type=_instant, help="when they begin; default: when published")
        reading.add_argument("--note", default="")
        reading.add_argument(
            "--allow-unpriced-hours", action="store_true", help="draft prices that leave hours of the day without one"
        )
        for action, what in (
            ("preview", "what last month would have cost"),
            ("publish", "publish it"),
            ("discard", "give it up"),
        ):
            parser_of_action = actions.add_parser(action, help=f"of a draft: {what}")
            parser_of_action.add_argument("draft", type=int)
            if action == "publish":
                parser_of_action.add_argument(
                    "--confirm", action="store_true", help="also if it starts before usage that has a price"
                )
        actions.add_parser("list", help="the versions, newest first")
        actions.add_parser("backfill", help="add prices for the embedded models that have none")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            getattr(self, f"_{options['action']}")(options)
        except ActionRefused as exc:
            raise CommandError(str(exc)) from exc

    def _import(self, options: dict[str, Any]) -> None:
        try:
            text = options["file"].read_text(encoding="utf-8")
            if options["file"].suffix == ".json":
                models = options["models"].split(",") if options["models"] else None
                imported = read_public(text, rounding=options["round"], models=models)
                self._say_left_out(imported)
                proposal = imported.proposal
            else:
                proposal = read_csv(text.splitlines())
        except (OSError, ValueError) as exc:
            raise CommandError(f"{options['file']}: {exc}") from exc
        draft = do_propose_prices(
            proposal,
            book=options["book"],
            tenant=None if options["tenant"] is None else tenant_of_slug(options["tenant"]),
            effective_from=options["start"],
            note=options["note"],
            allow_unpriced_hours=options["allow_unpriced_hours"],
        )
        self.stdout.write(
            f"Draft {draft.pk}: {len(proposal.prices)} prices of {len(proposal.model_tiers)} models and tiers."
        )

    def _say_left_out(self, imported: Imported) -> None:
        what = "rounded" if imported.rounded else "left out (--round takes them rounded)"
        for title, found in (
            (f"Not whole nano-USD a million, {what}", imported.not_whole),
            ("No prices, left out", imported.refused),
            ("Models without a price per token, left out", imported.unpriced),
            ("Models that are free, as the file says", imported.free),
            ("Assumed prices, which the file does not have", imported.assumed),
            ("Prices of what is not metered, left out", [f"{n} x {name}" for name, n in imported.other_fields.items()]),
        ):
            if found:
                shown = len(found) if found is imported.assumed else _SHOWN  # each assumed price may be wrong
                rest = f" and {len(found) - shown} more" if len(found) > shown else ""
                self.stdout.write(f"{title}: {len(found)}\n  " + "\n  ".join(found[:shown]) + rest)

    def _preview(self, options: dict[str, Any]) -> None:
        start, end = last_month()
        self.stdout.write(f"{start:%Y-%m-%d} to {end:%Y-%m-%d} UTC, USD:")
        rows = preview(_draft(options["draft"]), start, end)
        for row in rows:
            self.stdout.write(_line(row))
        if not rows:
            self.stdout.write("No usage that these prices would have touched.")

    def _publish(self, options: dict[str, Any]) -> None:
        version = do_publish_prices(_draft(options["draft"]), by=None, over_billed_usage=options["confirm"])
        self.stdout.write(
            f"Published as version {version.number}, from {version.effective_from:%Y-%m-%d %H:%M} UTC on."
        )

    def _discard(self, options: dict[str, Any]) -> None:
        do_discard_prices(_draft(options["draft"]), by=None)

    def _list(self, options: dict[str, Any]) -> None:
        with all_tenants_scope(BypassReason.COMMAND):
            versions = list(PriceVersion.objects.select_related("book").defer("body"))
        for version in versions:
            owner = f" of tenant {version.tenant_id}" if version.tenant_id else ""
            since = f", from {version.effective_from:%Y-%m-%d %H:%M}" if version.effective_from else ""
            self.stdout.write(f"{version.pk}: {version.book}{owner}, {version.state}{since} {version.note}".rstrip())

    def _backfill(self, options: dict[str, Any]) -> None:
        specs = [spec for spec in settings.MILLRACE.models if spec.source.startswith("embedded")]
        proposal = demo_prices.proposal(
            [spec.name for spec in specs if spec.source == "embedded"],
            [spec.name for spec in specs if spec.source != "embedded"],
        )
        for model, tier in do_price_unpriced(proposal, "Prices of the embedded models"):
            self.stdout.write(f"{model} ({tier})")


def _line(row: Comparison) -> str:
    was, would_be = (Decimal(femto).scaleb(-FEMTO_DIGITS) for femto in (row.was_femto, row.would_be_femto))
    refused = f", {row.unpriced} events without a price" if row.unpriced else ""
    return f"tenant {row.tenant_id}, {row.model}: {row.events} events, {was:f} -> {would_be:f}{refused}"


def _draft(pk: int) -> PriceVersion:
    with all_tenants_scope(BypassReason.COMMAND):
        version = PriceVersion.objects.filter(pk=pk).first()
    if version is None:
        raise CommandError(f"There is no draft {pk}.")
    return version


def _instant(text: str) -> datetime:
    try:
        return instant(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no date and no time") from None
