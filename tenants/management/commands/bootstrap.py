"""`manage.py bootstrap`: the initial operator, tenant and API key of a new platform."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand
from django.db import connection, transaction

from millrace.devserver.state_file import write_private
from tenants import actions
from tenants.authentication import find_key
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import Project, Tenant, User

OPERATOR_EMAIL = "operator@millrace.local"
OWNER_EMAIL = "owner@millrace.local"
DEMO = "demo"
DEMO_POLICY = "smollm2"
_LOCK = 0x6D696C6C  # the number of an advisory lock; unique in the database


class Command(BaseCommand):
    help = (
        "Create an operator, the tenant 'demo', its owner and its API key if they do not exist. Prints one line of JSON"
        " with logins and the API key. They are also stored in credentials.json in the data directory."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        actions.do_rehash_unpeppered()
        path = settings.MILLRACE.data_dir / "credentials.json"
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
            found = _read(path)
            tenant = _demo_tenant()
            credentials = {
                "operator_email": OPERATOR_EMAIL,
                "operator_password": _password(OPERATOR_EMAIL, found.get("operator_password"), _make_operator),
                "owner_email": OWNER_EMAIL,
                "owner_password": _password(
                    OWNER_EMAIL, found.get("owner_password"), lambda password: _make_owner(tenant, password)
                ),
                "demo_key": _demo_key(tenant, found.get("demo_key")),
                "tenant": DEMO,
            }
            # Written before the commit. A kill in between leaves a file whose secrets are replaced next time. In the
            # other order, it would leave rows whose secrets are lost.
            if credentials != found:
                write_private(path, json.dumps(credentials, indent=2) + "\n")
        self.stdout.write(json.dumps(credentials))


def _read(path: Path) -> dict[str, str]:
    try:
        credentials = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return credentials if isinstance(credentials, dict) else {}


def _password(email: str, known: str | None, make: Callable[[str], None]) -> str:
    """Return the user's stored password, or set a new one if none is stored.

    A password that the user has changed is not reset; the returned one is then not valid.
    """
    person = User.objects.filter(email=email).first()
    if person is not None and known:
        return known
    password = secrets.token_urlsafe(15)
    if person is None:
        make(password)
    else:
        person.set_password(password)
        person.save(update_fields=["password"])
    return password


def _make_operator(password: str) -> None:
    User.objects.create_superuser(OPERATOR_EMAIL, password, name="Operator")


def _make_owner(tenant: Tenant, password: str) -> None:
    actions.do_add_member(tenant, User.objects.create_user(OWNER_EMAIL, password, name="Demo owner"), "owner")


def _demo_tenant() -> Tenant:
    """Create the demo tenant, with a routing policy over the deployments of the embedded model."""
    with all_tenants_scope(BypassReason.BOOTSTRAP):
        known = Tenant.objects.all_tenants().filter(slug=DEMO).first()
    if known is not None:
        return known
    tenant = actions.do_create_tenant(DEMO, "Demo", is_demo=True)
    embedded = [spec.name for spec in settings.MILLRACE.models if spec.source == "embedded"]
    if len(embedded) > 1:
        targets = [{"model": name, "weight": 1} for name in embedded]
        actions.do_publish_policy(tenant, DEMO_POLICY, {"rules": [{"targets": targets}]})
    return tenant


def _demo_key(tenant: Tenant, known: str | None) -> str:
    """Return the demo tenant's key: the stored one while it is active, otherwise a new one."""
    if known and (key := find_key(known)) is not None and key.is_live and key.tenant_id == tenant.pk:
        return known
    with tenant_scope(tenant):
        project = Project.objects.for_tenant(tenant).get(slug="default")
    _, secret = actions.do_create_api_key(project, "Demo key", scopes=("inference", "manage", "models"))
    return secret
