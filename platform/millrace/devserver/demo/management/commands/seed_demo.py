"""`manage.py seed_demo`: a platform with life in it."""

from __future__ import annotations

import argparse
import logging
import time
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from millrace.conf.environment import platform_settings
from millrace.devserver.demo import live, seeding
from millrace.devserver.demo.backfill import BackfillProgress
from millrace.devserver.demo.history import DAYS, PREFIX
from millrace.devserver.demo.running import EVENTS, Busy, Played, models, play, secrets

MOST_DAYS = 180
_LINE_SECONDS = 2.0  # between lines of progress that is no terminal's


class Command(BaseCommand):
    help = (
        "Fill the console with life: five demo tenants (demo-harbor, demo-lantern near its budget, demo-copper over"
        " it, demo-meadow, and demo-blank, which is empty) with people, keys, budgets and limits; two months of usage,"
        " sent through the settler at a price book of their own; last month drafted and partly invoiced by a company"
        f" of their own; then some requests to the running platform. Usage made up has request ids in {PREFIX}…. A"
        " second run adds what is new since the first and nothing twice. There is no way back: usage and invoices are"
        " append-only. To be rid of it all, delete the data directory."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
        parser.add_argument("--events", type=_count, default=EVENTS, help="usage events of each tenant, approximately")
        parser.add_argument("--days", type=_days, default=DAYS, help="how far back it reaches")
        parser.add_argument("--seconds", type=_count, default=20, help="duration of the live requests; 0: none")
        parser.add_argument("--requests", type=_count, default=200, help="maximum number of live requests")
        parser.add_argument("--password", help="let the demo people log in with it (owner@demo-harbor.example, …)")
        parser.add_argument(
            "--allow-real-tenants",
            action="store_true",
            help="do it although there are tenants that are no demo; theirs stays as it is",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        real = seeding.real_tenants()
        if real and not options["allow_real_tenants"]:
            named = ", ".join(real[:5]) + (", …" if len(real) > 5 else "")
            raise CommandError(
                f"There are tenants that are no demo ({named}), and what this makes cannot be taken back. Give"
                " --allow-real-tenants if you mean it."
            )
        if options["verbosity"] < 2:
            logging.disable(logging.INFO)  # the settler tells of each execution
        try:
            self._run(options)
        finally:
            logging.disable(logging.NOTSET)

    def _run(self, options: dict[str, Any]) -> None:
        began = time.monotonic()
        progress = _Progress(self.stdout, self.stdout.isatty())
        try:
            played = play(
                days=options["days"], events=options["events"], password=options["password"], tell=progress.days
            )
        except Busy as exc:
            raise CommandError(str(exc)) from exc
        progress.end()
        self._sum_up(played, time.monotonic() - began)
        if options["seconds"]:
            self._live(played, options)

    def _sum_up(self, played: Played, seconds: float) -> None:
        told, billed = played.told, played.billed
        self.stdout.write(
            f"{told.settled:,} requests settled in {seconds:.0f} s; {told.known:,} were there, {told.refused:,} were"
            f" refused by a budget."
        )
        self.stdout.write(f"Invoices: {len(billed.final)} final ({', '.join(billed.final)}), {billed.drafts} drafts.")
        for line in billed.left:
            self.stdout.write(f"Not invoiced: {line} Run this again in two minutes.")
        if told.quarantined:
            raise CommandError(f"{told.quarantined} events are in quarantine: see /operator/.")

    def _live(self, played: Played, options: dict[str, Any]) -> None:
        url = platform_settings().base_url
        progress = _Progress(self.stdout, self.stdout.isatty())
        try:
            asked = live.ask(
                played.players,
                secrets(),
                models(),
                url,
                seconds=options["seconds"],
                most=options["requests"],
                tell=progress.asked,
            )
        except live.NobodyAnswers as exc:
            self.stdout.write(f"No live requests: {exc}. Start it with `make up` and run this again.")
            return
        progress.end()
        statuses = ", ".join(f"{status or 'none'}: {count}" for status, count in sorted(asked.statuses.items()))
        self.stdout.write(f"{asked.requests} live requests, {asked.tokens:,} tokens. Answers by status: {statuses}.")
        if not asked.requests:
            self.stdout.write(f"The demo keys' secrets are not in {secrets().path}: nothing could be asked.")


class _Progress:
    """A line that moves on a terminal, a line now and then elsewhere."""

    def __init__(self, out: Any, lively: bool) -> None:
        self._out, self._lively, self._said = out, lively, time.monotonic()

    def days(self, told: BackfillProgress) -> None:
        self._say(f"history: {100 * told.done // max(1, told.of)} %, {told.settled:,} requests")

    def asked(self, asked: live.LiveResult) -> None:
        self._say(f"live: {asked.requests} requests, {asked.tokens:,} tokens")

    def end(self) -> None:
        if self._lively:
            self._out.write("\r\x1b[2K", ending="")

    def _say(self, text: str) -> None:
        if self._lively:
            self._out.write(f"\r\x1b[2K  {text}", ending="")
            self._out.flush()
        elif time.monotonic() - self._said > _LINE_SECONDS:
            self._said = time.monotonic()
            self._out.write(f"  {text}")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on")
    return int(text)


def _days(text: str) -> int:
    days = _count(text)
    if not 1 <= days <= MOST_DAYS:
        raise argparse.ArgumentTypeError(f"want 1 to {MOST_DAYS} days")
    return days
