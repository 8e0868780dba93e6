"""`millrace manage seed_demo`: fill a platform with demo data."""

from __future__ import annotations

import argparse
import logging
import time
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from millrace.demo import live, seeding
from millrace.demo.backfill import BackfillProgress
from millrace.demo.history import DAYS, PREFIX
from millrace.demo.running import EVENTS, DemoResult, DemoRunning, create_demo, models, secrets
from millrace.environment.configuration import platform_settings

MAX_DAYS = 180
_LINE_SECONDS = 2.0  # between lines of progress without a terminal


class Command(BaseCommand):
    help = (
        "Fill the console with five demo tenants (demo-harbor, demo-lantern near its budget, demo-copper over"
        " it, demo-meadow, and demo-blank, which is empty) with users, keys, budgets and limits; two months of usage,"
        " settled with a separate price book; drafts and invoices of past months by a separate billing"
        f" entity; then live requests to the running platform. Generated usage has request IDs with {PREFIX}…. A"
        " later run adds only what is new. The data cannot be removed, since usage and invoices are"
        " append-only. To start again, delete the data directory."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
        parser.add_argument("--events", type=_count, default=EVENTS, help="usage events of each tenant, approximately")
        parser.add_argument("--days", type=_days, default=DAYS, help="days of history before now")
        parser.add_argument("--seconds", type=_count, default=20, help="duration of the live requests; 0: none")
        parser.add_argument("--requests", type=_count, default=200, help="maximum number of live requests")
        parser.add_argument("--password", help="password of the demo users (owner@demo-harbor.example, …)")
        parser.add_argument(
            "--allow-real-tenants",
            action="store_true",
            help="also run on a platform with real tenants, whose data is not changed",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        real = seeding.real_tenants()
        if real and not options["allow_real_tenants"]:
            tenant_names = ", ".join(real[:5]) + (", …" if len(real) > 5 else "")
            raise CommandError(
                f"The platform has real tenants ({tenant_names}), and demo data cannot be removed. Pass"
                " --allow-real-tenants to continue."
            )
        if options["verbosity"] < 2:
            logging.disable(logging.INFO)  # the settler logs each execution
        try:
            self._run(options)
        finally:
            logging.disable(logging.NOTSET)

    def _run(self, options: dict[str, Any]) -> None:
        started_at = time.monotonic()
        progress = _Progress(self.stdout, self.stdout.isatty())
        try:
            demo = create_demo(
                days=options["days"], events=options["events"], password=options["password"], on_progress=progress.days
            )
        except DemoRunning as exc:
            raise CommandError(str(exc)) from exc
        progress.end()
        self._sum_up(demo, time.monotonic() - started_at)
        if options["seconds"]:
            self._live(demo, options)

    def _sum_up(self, demo: DemoResult, seconds: float) -> None:
        progress, billed = demo.progress, demo.billed
        self.stdout.write(
            f"{progress.settled:,} requests settled in {seconds:.0f} s; {progress.known:,} existed before,"
            f" {progress.refused:,} were rejected by a budget."
        )
        self.stdout.write(f"Invoices: {len(billed.final)} final ({', '.join(billed.final)}), {billed.drafts} drafts.")
        for line in billed.problems:
            self.stdout.write(f"Not invoiced: {line} Run this again in two minutes.")
        if progress.quarantined:
            raise CommandError(f"{progress.quarantined} events are in quarantine. See /operator/.")

    def _live(self, demo: DemoResult, options: dict[str, Any]) -> None:
        url = platform_settings().base_url
        progress = _Progress(self.stdout, self.stdout.isatty())
        try:
            result = live.send_requests(
                demo.demo_tenants,
                secrets(),
                models(),
                url,
                seconds=options["seconds"],
                max_requests=options["requests"],
                on_progress=progress.requests,
            )
        except live.GatewayUnreachable as exc:
            self.stdout.write(f"No live requests: {exc}. Start it with `make up` and run this again.")
            return
        progress.end()
        statuses = ", ".join(f"{status or 'none'}: {count}" for status, count in sorted(result.statuses.items()))
        self.stdout.write(
            f"{result.requests} live requests, {result.tokens:,} tokens. Responses by status: {statuses}."
        )
        if not result.requests:
            self.stdout.write(f"The demo keys' secrets are not in {secrets().path}: no requests were sent.")


class _Progress:
    """A line that is updated on a terminal, or plain lines at intervals."""

    def __init__(self, out: Any, is_terminal: bool) -> None:
        self._out, self._is_terminal, self._printed_at = out, is_terminal, time.monotonic()

    def days(self, progress: BackfillProgress) -> None:
        self._print(f"history: {100 * progress.done // max(1, progress.of)} %, {progress.settled:,} requests")

    def requests(self, result: live.LiveResult) -> None:
        self._print(f"live: {result.requests} requests, {result.tokens:,} tokens")

    def end(self) -> None:
        if self._is_terminal:
            self._out.write("\r\x1b[2K", ending="")

    def _print(self, text: str) -> None:
        if self._is_terminal:
            self._out.write(f"\r\x1b[2K  {text}", ending="")
            self._out.flush()
        elif time.monotonic() - self._printed_at > _LINE_SECONDS:
            self._printed_at = time.monotonic()
            self._out.write(f"  {text}")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return int(text)


def _days(text: str) -> int:
    days = _count(text)
    if not 1 <= days <= MAX_DAYS:
        raise argparse.ArgumentTypeError(f"must be 1 to {MAX_DAYS} days")
    return days
