"""`millrace manage bootstrap`: the first operator, tenant and API key of a new platform."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand
from django.db import connection, transaction

from millrace.environment.private_files import write_private
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
        "In an empty database, create an operator, and the tenant 'demo' with its owner and an API key unless"
        " MILLRACE_DEMO_TENANT is false. Their secrets are stored in credentials.json in the data directory. In any"
        " other database nothing is created or restored. Prints one line of JSON with the logins and the API key of"
        " that file that still exist."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        self.stdout.write(json.dumps(bootstrap(settings.MILLRACE.data_dir, with_demo=settings.MILLRACE.demo_tenant)))


def bootstrap(data_dir: Path, *, with_demo: bool) -> dict[str, str]:
    """Create the first accounts if the database is empty. Return the stored accounts that still exist.

    The database is empty if it contains no user and no tenant. No action deletes these rows. So what a person has
    changed, revoked or deleted since the first start is never restored.
    """
    actions.do_rehash_unpeppered()
    path = data_dir / "credentials.json"
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        if not _is_empty():
            return _existing(_read(path))
        accounts = _create_operator()
        if with_demo:
            accounts |= _create_demo()
        # Written before the commit. A kill in between leaves a file that the next start overwrites, since the database
        # is still empty. In the other order, it would leave rows whose secrets are lost.
        write_private(path, json.dumps(accounts, indent=2) + "\n")
    return accounts


def _is_empty() -> bool:
    with all_tenants_scope(BypassReason.BOOTSTRAP):
        return not User.objects.exists() and not Tenant.objects.all_tenants().exists()


def _read(path: Path) -> dict[str, str]:
    try:
        accounts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return accounts if isinstance(accounts, dict) else {}


def _existing(accounts: dict[str, str]) -> dict[str, str]:
    """Return the accounts without users that cannot sign in and without a key that is not accepted.

    A password that the user has changed is not detected.
    """
    emails = [accounts.get(name, "") for name in ("operator_email", "owner_email")]
    users = {user.email: user for user in User.objects.filter(email__in=emails, is_active=True)}
    names: list[str] = []
    operator = users.get(accounts.get("operator_email", ""))
    if operator is not None and operator.is_staff:
        names += ["operator_email", "operator_password"]
    if accounts.get("owner_email") in users:
        names += ["owner_email", "owner_password"]
    key = find_key(accounts.get("demo_key", ""))
    if key is not None and key.is_live and not key.tenant.is_suspended:
        names += ["demo_key", "tenant"]
    return {name: accounts[name] for name in names if name in accounts}


def _create_operator() -> dict[str, str]:
    password = secrets.token_urlsafe(15)
    User.objects.create_superuser(OPERATOR_EMAIL, password, name="Operator")
    return {"operator_email": OPERATOR_EMAIL, "operator_password": password}


def _create_demo() -> dict[str, str]:
    """Create the demo tenant, its owner, a key, and a routing policy over the deployments of the embedded model."""
    tenant = actions.do_create_tenant(DEMO, "Demo", is_demo=True)
    embedded = [spec.name for spec in settings.MILLRACE.models if spec.source == "embedded"]
    if len(embedded) > 1:
        targets = [{"model": name, "weight": 1} for name in embedded]
        # The models and their prices are imported after this command.
        actions.do_publish_policy(tenant, DEMO_POLICY, {"rules": [{"targets": targets}]}, check_targets=False)
    password = secrets.token_urlsafe(15)
    actions.do_add_member(tenant, User.objects.create_user(OWNER_EMAIL, password, name="Demo owner"), "owner")
    with tenant_scope(tenant):
        project = Project.objects.for_tenant(tenant).get(slug="default")
    _, key = actions.do_create_api_key(project, "Demo key", scopes=("inference", "manage", "models"))
    return {"owner_email": OWNER_EMAIL, "owner_password": password, "demo_key": key, "tenant": DEMO}
