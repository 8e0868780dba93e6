"""The delivery of all outboxes, tried with emails to members. Webhooks and invoices have tests of their own."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from smtplib import SMTPServerDisconnected
from typing import Any

import pytest
from django.conf import settings
from django.core import mail

import billing.tasks  # noqa: F401  (registers its outbox)
from inference_worker.contract import valkey
from tenants import actions
from tenants.isolation.scopes import tenant_scope
from tenants.models import OutboxEmail, Tenant, User
from tenants.outbox import email_outbox
from tenants.outbox.delivery import INTERNAL_ERROR, OUTBOXES
from tenants.outbox.email_outbox import MEMBER_EMAILS, enqueue_email
from tenants.outbox.totals import TOTALS_KEY, read_totals
from tenants.schedule import BEAT_SCHEDULE
from tenants.tasks import deliver
from tests.support.outbox import send_emails
from tests.support.rows import of

pytestmark = pytest.mark.django_db


@pytest.fixture
def tenant() -> Tenant:
    tenant = actions.do_create_tenant("acme", "Acme", owner=User.objects.create_user("owner@acme.example"))
    with tenant_scope(tenant):
        enqueue_email(tenant.pk, ["owner"], "Hello", "Text")
    return tenant


def totals() -> dict[str, int]:
    with valkey.connect(settings.MILLRACE.valkey_url, valkey.PAGES) as broker:
        return {outcome: count for name, outcome, count in read_totals(broker.hgetall(TOTALS_KEY)) if name == "email"}


def fail(self: object) -> None:
    raise SMTPServerDisconnected


def test_each_outbox_is_scheduled() -> None:
    scheduled = [entry["args"] for entry in BEAT_SCHEDULE.values() if entry["task"] == "tenants.deliver"]
    assert sorted(scheduled) == sorted([name] for name in OUTBOXES) == [["email"], ["invoice_email"], ["webhook"]]


def test_attempts_are_counted(tenant: Tenant) -> None:
    before = totals()
    assert [deliver("email"), deliver("email")] == [1, 0]
    assert totals() == before | {"sent": before.get("sent", 0) + 1}
    assert [message.subject for message in mail.outbox] == ["Hello"]


def test_an_email_fails_after_twelve_attempts(tenant: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django.core.mail.EmailMessage.send", fail)
    now, outcomes, waits = datetime.now(UTC), [], []
    for _ in range(12):
        outcomes += list(MEMBER_EMAILS.send_due(now))
        (row,) = of(OutboxEmail, tenant)
        waits.append(row.next_attempt_at - now)
        now = row.next_attempt_at
    assert outcomes == ["retried"] * 11 + ["failed"]
    assert waits[:3] == [timedelta(minutes=4), timedelta(minutes=8), timedelta(minutes=16)]
    assert (row.state, row.error, row.sent_at) == ("failed", "The mail server could not be reached.", None)
    assert send_emails(now + timedelta(days=365)) == 0


def test_an_email_fails_if_its_sender_is_killed_in_each_attempt(tenant: Tenant) -> None:
    now = datetime.now(UTC)
    for _ in range(12):
        assert MEMBER_EMAILS.claim(now) is not None
        now += timedelta(minutes=5)
    assert MEMBER_EMAILS.send_due(now) == {"failed": 1}
    (row,) = of(OutboxEmail, tenant)
    assert (row.state, row.error, row.sent_at) == ("failed", INTERNAL_ERROR, None)
    assert mail.outbox == []


def test_an_error_of_one_email_is_retried_and_does_not_keep_others_from_being_sent(
    tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tenant_scope(tenant):
        enqueue_email(tenant.pk, ["owner"], "Second", "Text")
    render = email_outbox.render_email

    def render_second(subject: str, *args: Any) -> Any:
        if subject == "Hello":
            raise ValueError("no template")
        return render(subject, *args)

    monkeypatch.setattr(email_outbox, "render_email", render_second)
    assert MEMBER_EMAILS.send_due(datetime.now(UTC)) == {"retried": 1, "sent": 1}
    rows = {row.subject: (row.state, row.error) for row in of(OutboxEmail, tenant)}
    assert rows == {"Hello": ("queued", INTERNAL_ERROR), "Second": ("sent", "")}
    monkeypatch.setattr(email_outbox, "render_email", render)
    assert MEMBER_EMAILS.send_due(datetime.now(UTC) + timedelta(minutes=5)) == {"sent": 1}


def test_a_sender_that_lost_its_lease_does_not_postpone_the_email(tenant: Tenant) -> None:
    now = datetime.now(UTC)
    slow = MEMBER_EMAILS.claim(now)
    assert MEMBER_EMAILS.claim(now) is None  # it is leased
    other = MEMBER_EMAILS.claim(now + timedelta(minutes=5))
    assert slow is not None
    assert other is not None
    failed = MEMBER_EMAILS.attempt(slow)._replace(error="slow")
    MEMBER_EMAILS.record(slow, failed, now)
    assert of(OutboxEmail, tenant)[0].leased_until == other.leased_until
    assert MEMBER_EMAILS.record(other, failed._replace(error=""), now) == "sent"
    assert MEMBER_EMAILS.record(slow, failed, now) == "retried"  # its own attempt
    (row,) = of(OutboxEmail, tenant)
    assert (row.state, row.error) == ("sent", "")
