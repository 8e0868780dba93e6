"""`millrace manage remove_second_factor EMAIL`: for the only operator, who cannot ask another operator."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from tenants import actions
from tenants.models import User


class Command(BaseCommand):
    help = "Remove a user's second factor and recovery codes, and sign the user out on all devices."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("email")

    def handle(self, *args: Any, **options: Any) -> None:
        user = User.objects.filter(email=options["email"].strip().lower()).first()
        if user is None:
            raise CommandError("There is no user with this email address.")
        if not actions.do_remove_second_factor(user):
            raise CommandError("This user has no second factor.")
        self.stdout.write(f"The second factor of {user.email} was removed.")
