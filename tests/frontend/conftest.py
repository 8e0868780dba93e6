from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from inference_worker.engine.request import TokenUsage
from inference_worker.protocol import Envelope, UsageEvent, encode


class Undefined(str):
    """What Django puts for an undefined name: here, a failure."""

    def __mod__(self, name: Any) -> str:
        raise AssertionError(f"a template asks for {name!r}, which is not there")

    def __contains__(self, part: object) -> bool:
        return part == "%s"


@pytest.fixture(autouse=True)
def _strict_templates(request: pytest.FixtureRequest, settings: Any) -> None:
    if "browser" in request.keywords:
        return  # those pages include Django's own, which do ask for undefined names
    templates = copy.deepcopy(settings.TEMPLATES)
    templates[0]["OPTIONS"]["string_if_invalid"] = Undefined("%s")
    settings.TEMPLATES = templates


@pytest.fixture
def use() -> Callable[..., str]:
    """Meters one leg for a tenant, as the settler does; gives the request's id."""

    def use(tenant: Any, **changes: Any) -> str:
        from billing.ingest import Message, settle  # here: this file is read before Django is set up

        at = changes.pop("at", datetime.now(UTC))
        counts = {name: changes.pop(name, 0) for name in TokenUsage.__dataclass_fields__}
        request_id = changes.pop("request_id", f"req_{secrets.token_hex(16)}")
        envelope = Envelope(
            admitted_at=int(at.timestamp()) * 1_000_000 + at.microsecond,
            request_id=request_id,
            leg=0,
            tenant_id=tenant.pk,
            project_id=1,
            key_id=changes.pop("key_id", 1),
            model=changes.pop("model", "smollm2-135m"),
        )
        fields = {"attempt": 1, "verdict": "completed", "finish_reason": "stop", "replica_id": "r", "block_size": 32}
        event = UsageEvent(envelope=envelope, usage=TokenUsage(**counts), **(fields | changes))
        assert settle([Message("1-0", encode(event))]).settled == 1
        return request_id

    return use


@pytest.fixture
def table(transactional_db: None, as_owner: Any) -> Iterator[None]:
    """Real commits; the usage they leave is taken out past the triggers that forbid it."""
    from django.db import connection

    yield
    with as_owner(), connection.cursor() as cursor:
        cursor.execute("ALTER TABLE billing_usageevent DISABLE TRIGGER USER")
        cursor.execute("DELETE FROM billing_usageevent")
        cursor.execute("ALTER TABLE billing_usageevent ENABLE TRIGGER USER")
