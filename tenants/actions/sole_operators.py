"""The rule for what usually needs two operators, while the platform has one: publication of the sole operator's prices.

Another operator who was removed recently could have been removed for this. So the rule waits for a week.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db import connection
from django.db.models import Q

from inference_worker.contract.texts import Text
from tenants.actions.common import Conflict
from tenants.models import User

SOLE_OPERATOR_PERIOD = timedelta(days=7)


def find_sole_operator_obstacle(user: User) -> Text | None:
    """Return why the user is not the sole operator. None: nothing is in the way."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        now: datetime = cursor.fetchone()[0]
    since = now - SOLE_OPERATOR_PERIOD
    wanted = Q(is_staff=True, is_active=True) | Q(operator_until__gt=since)
    others = list(User.objects.filter(wanted).exclude(pk=user.pk).order_by("pk"))
    if any(other.is_staff and other.is_active for other in others):
        return Text("Another operator must review and publish these prices.")
    if others:
        until = max(other.operator_until for other in others if other.operator_until is not None)
        return Text(
            "Another operator must review and publish these prices. One was deactivated or lost the right on %(day)s."
            " From %(later)s UTC on, you need no second operator.",
            day=f"{until:%F}",
            later=f"{until + SOLE_OPERATOR_PERIOD:%F %R}",
        )
    return None


def require_sole_operator(user: User) -> None:
    """Require that the user is the sole operator, until the transaction ends: actions on users lock the operators too.

    Raises:
        Conflict: there is another active operator, or there was one in the last days.
    """
    operators = User.objects.select_for_update(no_key=True).filter(Q(pk=user.pk) | Q(is_staff=True, is_active=True))
    locked = {row.pk: row for row in operators.order_by("pk")}.get(user.pk)
    if locked is None or not (locked.is_staff and locked.is_active):
        raise Conflict(Text("You are no active operator any more."))
    obstacle = find_sole_operator_obstacle(user)
    if obstacle is not None:
        raise Conflict(obstacle)
