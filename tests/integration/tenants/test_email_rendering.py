"""Emails: text and HTML with the same content, one style, and no external resources."""

from __future__ import annotations

import re

import pytest
from django.core import mail

from millrace.environment.configuration import platform_settings
from tenants import actions, invitations
from tenants.actions.webhooks import do_create_endpoint, do_disable_endpoint
from tenants.models import User
from tenants.outbox.email_rendering import render_email
from tenants.tasks import send_password_reset_email
from tests.support.emails import check_email, html
from tests.support.outbox import send_emails


def test_values_are_escaped_only_in_html():
    message = render_email("Ben & Jerry\nBcc: all", '5 < 6 & "7"\nnext line\n\nlast', ["a@example.com"])
    assert message.subject == "Ben & Jerry Bcc: all"
    assert '5 < 6 & "7"\nnext line\n\nlast\n' in message.body
    assert "5 &lt; 6 &amp; &quot;7&quot;<br>next line" in html(message)
    assert "<title>Ben &amp; Jerry Bcc: all</title>" in html(message)


@pytest.mark.parametrize("foreign", ["https://evil.example/", "{home}.evil.example/", "{home}/a b"])
def test_only_the_platforms_own_urls_are_buttons(foreign):
    home = platform_settings().base_url
    message = render_email("S", f"{foreign.format(home=home)}\n\n{home}/t/acme/", ["a@example.com"], button="Go on")
    assert re.findall(r'href="([^"]*)"', html(message)) == [f"{home}/t/acme/"]
    assert "Go on</a>" in html(message)


@pytest.mark.django_db(transaction=True)
def test_an_invitation_email():
    acme = actions.do_create_tenant("acme", "Acme <Robotics>")
    invitation = actions.do_invite(acme, "new@acme.example", "billing")
    assert send_emails() == 1
    (message,) = mail.outbox
    check_email(message, invitations.link(invitation), "Billing", f"{invitation.expires_at:%-d %B %Y, %H:%M} UTC")
    assert "Acme &lt;Robotics&gt;" in html(message)
    assert "Accept invitation</a>" in html(message)


@pytest.mark.django_db(transaction=True)
def test_an_email_of_a_disabled_webhook():
    owner = User.objects.create_user("owner@acme.example")
    endpoint, _ = do_create_endpoint(actions.do_create_tenant("acme", "Acme", owner=owner), "https://example.com/hook")
    do_disable_endpoint(endpoint, because="Nothing has arrived for 3 days.")
    assert send_emails() == 1
    (message,) = mail.outbox
    check_email(message, "https://example.com/hook", "Nothing has arrived for 3 days.", "/t/acme/webhooks/")
    assert "Message-ID" in message.extra_headers
    assert 'href="https://example.com/hook"' not in html(message)


@pytest.mark.django_db
def test_an_email_of_a_password_reset():
    User.objects.create_user("owner@acme.example", "correct horse battery staple")
    send_password_reset_email("Owner@acme.example ")
    (message,) = mail.outbox
    assert message.subject == "Set a new password"
    (link,) = re.findall(r"http\S+/account/password/reset/\S+", message.body)
    check_email(message, link)
    assert f'href="{link}"' in html(message)
