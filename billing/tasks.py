"""Celery tasks of billing (see billing/schedule.py for their schedule)."""

from __future__ import annotations

import structlog
from celery import shared_task
from django.conf import settings

from billing.budgets import alerts
from billing.invoicing import emails, runs
from billing.invoicing.dunning import suspend_overdue
from billing.invoicing.one_off_lines import do_count_due_lines
from billing.invoicing.reratings import continue_reratings
from billing.ledger.credits import do_expire_credits, do_follow_credits
from billing.metering import rollups
from billing.metering.end_users import build_end_users
from billing.metering.partitions import ensure_partitions
from billing.metering.reconciler import reconcile
from billing.payments.events import do_purge_events
from billing.payments.file_drop import collect
from billing.payments.top_ups import do_top_up_all
from billing.pricing.exchange_rates import read_feed
from billing.pricing.prices import do_start_scheduled_prices
from billing.reservations.lease_sums import fold_leases as fold_closed_leases
from billing.taxes import vies

log = structlog.get_logger(__name__)


@shared_task(name="billing.make_partitions")
def make_partitions() -> list[str]:
    """Create the partitions of usage events for the next months. Return the new ones."""
    made = ensure_partitions()
    if made:
        log.info("partitions_created", names=made)
    return made


@shared_task(name="billing.update_rollups")
def update_rollups() -> int:
    """Update the sums of usage by hour and day. Return how many hours were computed."""
    return rollups.build().hours


@shared_task(name="billing.fold_leases")
def fold_leases() -> int:
    """Replace old closed leases by sums. Return how many."""
    return fold_closed_leases()


@shared_task(name="billing.update_end_users")
def update_end_users() -> int:
    """Update the sums of usage by end user. Return how many days were computed."""
    return build_end_users()


@shared_task(name="billing.generate_invoices")
def generate_invoices() -> None:
    """Count the one-off lines that are due, invoice the months that are over, and send the invoices by email."""
    do_count_due_lines()
    report = runs.invoice_months()
    log.info("months_invoiced", finalized=len(report.finalized), left=len(report.left))
    emails.send_all()


@shared_task(name="billing.start_scheduled_prices")
def start_scheduled_prices() -> int:
    """Give effect to scheduled prices whose time has come. Return how many versions."""
    started = do_start_scheduled_prices()
    if started:
        log.info("scheduled_prices_started", versions=[version.pk for version in started])
    return len(started)


@shared_task(name="billing.apply_reratings")
def apply_reratings() -> int:
    """Issue the notes of applied re-ratings. Return how many are new."""
    report = continue_reratings()
    if report.issued or report.left:
        log.info("reratings_continued", issued=len(report.issued), left=len(report.left))
    return len(report.issued)


@shared_task(name="billing.send_payment_reminders")
def send_payment_reminders() -> int:
    """Create reminders of invoices past due, and suspend tenants with overdue ones. Return how many are new."""
    new = emails.remind()
    log.info("dunning", reminders=new, suspended=suspend_overdue())
    return new


@shared_task(name="billing.expire_credits")
def expire_credits() -> int:
    """Expire credits. Return how many."""
    return do_expire_credits()


@shared_task(name="billing.follow_credits")
def follow_credits() -> int:
    """Update the gates of prepaid tenants whose credit has started or expired. Return how many."""
    return do_follow_credits()


@shared_task(name="billing.collect_payments")
def collect_payments() -> int:
    """Record payments from files in the data directory's `payments`. Return how many were new."""
    return collect(settings.MILLRACE.data_dir / "payments")


@shared_task(name="billing.check_vat_ids")
def check_vat_ids() -> int:
    """Check the EU VAT IDs of billing profiles with VIES. Return how many were answered."""
    return vies.check_profiles()


@shared_task(name="billing.read_exchange_rates")
def read_exchange_rates() -> int:
    """Import the newest exchange rates of the feed, if it is enabled. Return how many are new."""
    imported = read_feed()
    return 0 if imported is None else imported.new


@shared_task(name="billing.top_up")
def top_up() -> int:
    """Buy prepaid credit for tenants whose balance is low. Return how many top-ups were paid or are processed."""
    return do_top_up_all()


@shared_task(name="billing.purge_payment_events")
def purge_payment_events() -> int:
    """Remove old events of payment providers. Return how many."""
    return do_purge_events()


@shared_task(name="billing.check_thresholds")
def check_thresholds() -> int:
    """Write alerts for budgets that reached a threshold. Return how many are new."""
    return alerts.check_thresholds()


@shared_task(name="billing.check_forecasts")
def check_forecasts() -> int:
    """Write alerts for budgets whose forecast exceeds the limit. Return how many are new."""
    return alerts.check_forecasts()


@shared_task(name="billing.reconcile")
def run_reconciler() -> bool:
    """Compare budget periods, leases, events and journals. Return whether all agreed."""
    return reconcile(settings.MILLRACE.data_dir / "journal").is_clean
