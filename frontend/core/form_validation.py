"""Validation of a submitted form before its user re-authenticates.

Without a recent authentication, the view of a submitted form runs in a read-only transaction that is rolled back. An
invalid form is shown with its errors. Before the action of a valid form, `require_confirmation` ends the view, and the
user is asked to re-authenticate.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from http import HTTPStatus

from django.db import DatabaseError, connection, transaction
from django.http.response import HttpResponseBase

_is_unconfirmed: ContextVar[bool] = ContextVar("is_unconfirmed", default=False)


class ConfirmationRequired(Exception):
    """A valid form whose action needs a re-authentication first."""


def require_confirmation() -> None:
    """End a view that only validates its form. Called before an action and before its message.

    Raises:
        ConfirmationRequired: the view only validates its form.
    """
    if _is_unconfirmed.get():
        raise ConfirmationRequired


def validate_form(view: Callable[[], HttpResponseBase]) -> HttpResponseBase | None:
    """Return the view's page with the errors of an invalid form; None if the form needs a re-authentication.

    A view that writes rows, although it must not, fails in the read-only transaction, and also returns None.
    """
    token = _is_unconfirmed.set(True)
    try:
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION READ ONLY")
            response = view()
            transaction.set_rollback(True)
    except (ConfirmationRequired, DatabaseError):
        return None
    finally:
        _is_unconfirmed.reset(token)
    return response if response.status_code == HTTPStatus.UNPROCESSABLE_ENTITY else None
