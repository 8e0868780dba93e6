"""Rendering of all emails as plain text and HTML, from one pair of templates.

Paragraphs of a text are separated by empty lines. A paragraph that is only a URL of this platform becomes a button.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from django.conf import settings
from django.core.mail import EmailMultiAlternatives
from django.template.loader import render_to_string


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of an email: `lines` of text, or the `url` and `label` of a button."""

    lines: tuple[str, ...]
    url: str = ""
    label: str = ""


def render_email(
    subject: str,
    text: str,
    to: Sequence[str],
    *,
    button: str = "Open Millrace",
    reason: str = "You receive this email as a member of an organization on Millrace.",
    settings_url: str = "",
    headers: Mapping[str, str] | None = None,
) -> EmailMultiAlternatives:
    """Return the email message.

    Args:
        subject: the subject line.
        text: paragraphs, separated by empty lines.
        to: email addresses of the recipients.
        button: label of the buttons.
        reason: why the recipient gets the email, in small print.
        settings_url: where the recipient can turn such emails off, after the reason.
        headers: additional headers.
    """
    subject = " ".join(subject.split())  # a line break would begin another header
    home = settings.MILLRACE.base_url
    paragraphs = [_paragraph(part, home, button) for part in text.strip().split("\n\n") if part.strip()]
    context = {
        "subject": subject,
        "paragraphs": paragraphs,
        "reason": reason,
        "settings_url": settings_url,
        "home": home,
    }
    message = EmailMultiAlternatives(
        subject, render_to_string("emails/message.txt", context), None, list(to), headers=dict(headers or {})
    )
    message.attach_alternative(render_to_string("emails/message.html", context), "text/html")
    return message


def _paragraph(part: str, home: str, button: str) -> Paragraph:
    lines = tuple(line.strip() for line in part.strip().splitlines())
    if len(lines) == 1 and (lines[0] == home or lines[0].startswith(f"{home}/")) and " " not in lines[0]:
        return Paragraph(lines, lines[0], button)
    return Paragraph(lines)
