"""`millrace manage revoke_api_key`: revoke a key permanently."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import ApiKey


class Command(BaseCommand):
    help = "Revoke the API key with this prefix, which the console shows. Gateways reject the key within a second."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("prefix", help="the key's visible start, for example: sk-mr-Ab12Cd")

    def handle(self, *args: Any, **options: Any) -> None:
        with all_tenants_scope(BypassReason.COMMAND):
            keys = list(ApiKey.objects.all_tenants().filter(prefix=options["prefix"]))
        if len(keys) != 1:
            raise CommandError(f"{len(keys) or 'No'} keys start with {options['prefix']!r}.")
        if actions.do_revoke_api_key(keys[0]):
            self.stdout.write(f"Revoked {keys[0]}.")
        else:
            self.stdout.write(f"{keys[0]} is already revoked.")
