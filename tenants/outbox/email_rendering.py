"""What every mail looks like: text, and HTML of the same words, by one pair of templates.

A text is paragraphs with an empty line between them. One that is only an address of this platform becomes a button.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from django.core.mail import EmailMultiAlternatives
from django.template.loader import render_to_string

from millrace.conf.environment import platform_settings


@dataclass(frozen=True)
class Paragraph:
    """`lines` of text; or the address that a button leads to, and what the button says."""

    lines: tuple[str, ...]
    url: str = ""
    label: str = ""


def letter(
    subject: str,
    text: str,
    to: Sequence[str],
    *,
    button: str = "Open Millrace",
    home: str = "",
    why: str = "You receive this email as a member of an organization on Millrace.",
    headers: Mapping[str, str] | None = None,
) -> EmailMultiAlternatives:
    """Return the mail, to be sent. `button`: what its buttons say. `home`: where they may lead, if not to the
    platform's own address. `why`: for whom it is, in small print."""
    subject = " ".join(subject.split())  # a line end would begin another header
    home = home or platform_settings().base_url
    paragraphs = [_paragraph(part, home, button) for part in text.strip().split("\n\n") if part.strip()]
    context = {"subject": subject, "paragraphs": paragraphs, "why": why, "home": home}
    message = EmailMultiAlternatives(
        subject, render_to_string("mails/letter.txt", context), None, list(to), headers=dict(headers or {})
    )
    message.attach_alternative(render_to_string("mails/letter.html", context), "text/html")
    return message


def _paragraph(part: str, home: str, button: str) -> Paragraph:
    lines = tuple(line.strip() for line in part.strip().splitlines())
    if len(lines) == 1 and (lines[0] == home or lines[0].startswith(f"{home}/")) and " " not in lines[0]:
        return Paragraph(lines, lines[0], button)
    return Paragraph(lines)
