"""`Idempotency-Key` on /api: a repeated POST is executed once and gets the stored response of the first call.
tenants.idempotency_rules has the rules that also apply to the inference API.

The first call commits a row that marks it as running. It then executes and stores its response in one transaction. A
repeated call is rejected while the first one runs. If the first call crashed, it has changed nothing, and a repeated
call takes over the row after `STALE`. A response can contain the secret of a new key, so it is encrypted with a key
derived from the header's value, which is not stored.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import wraps
from typing import Any, TypeVar, cast

from cryptography.fernet import Fernet
from django.db import IntegrityError, transaction
from django.http import HttpResponse
from django.utils.crypto import salted_hmac
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import exceptions
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from tenants import idempotency_rules as rules
from tenants.authentication import KeyCaller
from tenants.models import IdempotentResponse
from tenants.problems import StateConflict

STALE = timedelta(seconds=60)
HEADER = OpenApiParameter(
    rules.KEY_HEADER,
    str,
    OpenApiParameter.HEADER,
    description="Identifies the call. A repeated call with the same body within a day returns the stored response.",
)
H = TypeVar("H", bound=Callable[..., Response])


class KeyReused(StateConflict):
    default_detail = rules.KEY_REUSED
    default_code = rules.CONFLICT


class StillRunning(StateConflict):
    default_detail = rules.STILL_RUNNING
    default_code = rules.CONFLICT
    wait = rules.RETRY_AFTER_SECONDS


def idempotent(handler: H) -> H:
    """Make the `post` of a view with a `scope()` idempotent, and describe its header.

    If the view has a `prepare`, it is called before the transaction. Slow work that must not hold locks belongs there.
    """

    @wraps(handler)
    def once(self: Any, request: Request, *args: Any, **kwargs: Any) -> Any:
        name = request.headers.get(rules.KEY_HEADER)
        prepare = getattr(self, "prepare", lambda _: None)
        if name is None:
            prepare(request)
            return handler(self, request, *args, **kwargs)
        if not rules.is_valid_key(name):
            raise exceptions.ValidationError({rules.KEY_HEADER: [rules.INVALID_KEY]})
        caller = f"key:{request.user.key.pk}" if isinstance(request.user, KeyCaller) else f"user:{request.user.pk}"
        sent = rules.fingerprint(f"{request.method} {request.get_full_path()}", request.body)
        call = _IdempotentRequest(self, caller, name, sent)
        if (stored := call.begin()) is not None:
            return stored
        try:
            prepare(request)
            with transaction.atomic():
                return call.end(handler(self, request, *args, **kwargs))
        except BaseException:
            call.forget()
            raise

    return cast(H, extend_schema(parameters=[HEADER])(once))


class _IdempotentRequest:
    """One call with an Idempotency-Key."""

    def __init__(self, view: Any, caller: str, name: str, sent: bytes) -> None:
        self._view = view
        self._sent = sent
        self._named = {"caller": caller, "name": hashlib.sha256(name.encode()).hexdigest()}
        key = salted_hmac("tenants.api.idempotency", f"{caller}\n{name}", algorithm="sha256").digest()
        self._cipher = Fernet(base64.urlsafe_b64encode(key))
        access = getattr(view, "access", None)
        self._tenant_id = None if access is None else access.tenant.pk

    def begin(self) -> HttpResponse | None:
        """Mark the call as running. Returns the stored response if the call was repeated.

        Raises:
            KeyReused: the header was used for another request. StillRunning: the first call is still running.
        """
        row = IdempotentResponse(tenant_id=self._tenant_id, request_hash=self._sent, **self._named)
        with self._view.scope():
            try:
                with transaction.atomic():
                    row.save(force_insert=True)
                return None
            except IntegrityError:
                return self._stored_response()

    def _stored_response(self) -> HttpResponse | None:
        rows = IdempotentResponse._base_manager.filter(**self._named)
        row = rows.first()
        if row is None:  # just deleted after a rejection, or of another tenant of the user
            raise StillRunning
        if bytes(row.request_hash) != self._sent:
            raise KeyReused
        if row.status is None or row.body is None:
            now = datetime.now(UTC)
            if rows.filter(status=None, created_at=row.created_at, created_at__lt=now - STALE).update(created_at=now):
                return None
            raise StillRunning
        body = self._cipher.decrypt(bytes(row.body))
        response = HttpResponse(body, status=row.status, content_type="application/json")
        response.headers[rules.REPLAYED_HEADER] = "true"
        return response

    def end(self, response: Response) -> Response:
        """Store the response, in the transaction of the call."""
        body = JSONRenderer().render(response.data)
        with self._view.scope():
            IdempotentResponse._base_manager.filter(**self._named).update(
                status=response.status_code, body=self._cipher.encrypt(body)
            )
        return response

    def forget(self) -> None:
        """Delete the row of a failed call, so that the call can be repeated."""
        with self._view.scope():
            IdempotentResponse._base_manager.filter(status=None, **self._named).delete()
