"""The lock of the catalog: changes of deployments and of their copy in Valkey follow each other."""

from __future__ import annotations

from django.db import connection

from inference_worker.contract.texts import Text
from millrace.apps.deployments.models import Deployment
from tenants.actions import Conflict

_LOCK = 0x6465706C  # the number of an advisory lock; unique in the database


def lock_catalog() -> None:
    """Lock the catalog until the end of the transaction."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])


def lock_deployment(name: str) -> Deployment:
    """Lock the catalog and return a deployment.

    Raises:
        Conflict: it does not exist.
    """
    lock_catalog()
    row = Deployment.objects.filter(name=name).first()
    if row is None:
        raise Conflict(Text("The deployment %(name)s does not exist.", name=repr(name)))
    return row
