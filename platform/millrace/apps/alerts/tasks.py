"""Web jobs of alert rules. `schedule.py` contains their schedule."""

from __future__ import annotations

from celery import shared_task

from millrace.apps.alerts import checks


@shared_task(name="alerts.check_rules")
def check_rules() -> int:
    """Check all alert rules. Returns the number of new alerts."""
    return checks.check_rules()


@shared_task(name="alerts.purge_expired")
def purge_expired() -> int:
    """Remove old alerts. Returns their number."""
    return checks.purge_expired()
