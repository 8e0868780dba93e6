from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _strict_templates(strict_templates: None) -> None:
    pass


@pytest.fixture(autouse=True)
def _password_resets_without_a_web_job(monkeypatch: pytest.MonkeyPatch) -> None:
    from tenants.outbox import user_emails  # here: imported before Django is set up

    monkeypatch.setattr(user_emails, "queue_password_reset_email", user_emails.send_password_reset_email)
