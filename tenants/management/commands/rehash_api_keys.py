"""`manage.py rehash_api_keys`: mix the newest pepper into keys stored without one, and say which peppers are in use."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand
from django.db.models import Count

from millrace.conf.environment import platform_settings
from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.keys import snapshot
from tenants.models import ApiKey


class Command(BaseCommand):
    help = (
        "Store keys that have no pepper in their hash under the newest one, then list how many live keys each pepper"
        " still holds. A key under an older pepper moves to the newest when it is next used; a pepper that holds none"
        " may be taken out of MILLRACE_KEY_PEPPERS."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        self.stdout.write(f"{actions.do_rehash_unpeppered()} keys stored again")
        with all_tenants_scope(BypassReason.COMMAND):
            live = ApiKey.objects.all_tenants().filter(revoked_at__isnull=True).order_by()
            held = dict(live.values_list("pepper").annotate(Count("id")))
        for place, pepper in enumerate(platform_settings().key_peppers, 1):
            name = snapshot.pepper_id(pepper)
            self.stdout.write(f"pepper {place} ({name}): {held.pop(name, 0)} live keys")
        for name, count in held.items():
            self.stdout.write(f"pepper {name or 'none'}, not in MILLRACE_KEY_PEPPERS: {count} live keys")
