"""`millrace manage rehash_api_keys`: add the newest pepper to hashes without one, and list the peppers in use."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand
from django.db.models import Count

from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.keys import snapshot
from tenants.models import ApiKey


class Command(BaseCommand):
    help = (
        "Add the newest pepper to key hashes without one, then list the number of active keys of each pepper. A key"
        " with an older pepper gets the newest one when it is next used. A pepper without keys can be removed from"
        " MILLRACE_KEY_PEPPERS."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        self.stdout.write(f"{actions.do_rehash_unpeppered()} keys stored again")
        with all_tenants_scope(BypassReason.COMMAND):
            live = ApiKey.objects.all_tenants().filter(revoked_at__isnull=True).order_by()
            held = dict(live.values_list("pepper").annotate(Count("id")))
        for place, pepper in enumerate(settings.MILLRACE.key_peppers, 1):
            name = snapshot.pepper_id(pepper)
            self.stdout.write(f"pepper {place} ({name}): {held.pop(name, 0)} live keys")
        for name, count in held.items():
            self.stdout.write(f"pepper {name or 'none'}, not in MILLRACE_KEY_PEPPERS: {count} live keys")
