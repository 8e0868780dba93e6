"""`millrace manage reset_password EMAIL`: for a user who lost the password and receives no email."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from tenants import actions
from tenants.models import User


class Command(BaseCommand):
    help = (
        "Set a new random password of a user, print it once, and sign the user out on all devices. A second factor"
        " remains; remove_second_factor removes it."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("email")

    def handle(self, *args: Any, **options: Any) -> None:
        user = User.objects.filter(email=options["email"].strip().lower()).first()
        if user is None:
            operators = User.objects.filter(is_staff=True, is_active=True).order_by("email")
            known = ", ".join(operators.values_list("email", flat=True)[:20])
            raise CommandError(f"There is no user with this email address. Operators: {known or 'none'}.")
        try:
            self.stdout.write(actions.do_reset_password(user))
        except actions.Conflict as exc:
            raise CommandError(str(exc)) from exc
