"""Periodic tasks of billing. Does not import Django, because millrace.conf.celery reads it before Django's setup."""

from __future__ import annotations

from typing import Any

from celery.schedules import crontab

BEAT_SCHEDULE: dict[str, dict[str, Any]] = {
    "billing-update-rollups": {"task": "billing.update_rollups", "schedule": 60.0},
    "billing-update-end-users": {"task": "billing.update_end_users", "schedule": 300.0, "options": {"expires": 300}},
    "billing-make-partitions": {"task": "billing.make_partitions", "schedule": crontab(hour="*/6", minute="17")},
    "billing-fold-leases": {"task": "billing.fold_leases", "schedule": crontab(minute="33")},
    "billing-generate-invoices": {"task": "billing.generate_invoices", "schedule": crontab(minute="13")},
    "billing-start-scheduled-prices": {
        "task": "billing.start_scheduled_prices",
        "schedule": 10.0,
        "options": {"expires": 10},
    },
    "billing-apply-reratings": {"task": "billing.apply_reratings", "schedule": crontab(minute="*/5")},
    "billing-send-payment-reminders": {
        "task": "billing.send_payment_reminders",
        "schedule": crontab(hour="9", minute="0"),
    },
    "billing-expire-credits": {"task": "billing.expire_credits", "schedule": crontab(hour="4", minute="41")},
    "billing-follow-credits": {"task": "billing.follow_credits", "schedule": 15.0, "options": {"expires": 15}},
    "billing-collect-payments": {"task": "billing.collect_payments", "schedule": crontab(minute="*/10")},
    "billing-check-vat-ids": {"task": "billing.check_vat_ids", "schedule": crontab(minute="7")},
    "billing-read-exchange-rates": {
        "task": "billing.read_exchange_rates",
        "schedule": crontab(hour="*/4", minute="37"),
    },
    "billing-top-up": {"task": "billing.top_up", "schedule": 60.0, "options": {"expires": 60}},
    "billing-purge-payment-events": {
        "task": "billing.purge_payment_events",
        "schedule": crontab(hour="4", minute="51"),
    },
    "billing-check-thresholds": {"task": "billing.check_thresholds", "schedule": 60.0, "options": {"expires": 60}},
    "billing-check-forecasts": {"task": "billing.check_forecasts", "schedule": crontab(minute="27")},
    "billing-reconcile": {"task": "billing.reconcile", "schedule": crontab(minute="*/5")},
}
