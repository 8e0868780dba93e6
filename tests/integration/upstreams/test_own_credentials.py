"""Requests of a tenant with its own credential, through a gateway and a worker that receives it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from billing.models import ExecutionCost
from inference_worker.contract.upstreams import UpstreamEngine, UpstreamSpec
from tenants.actions.credentials import do_create_credential, do_remove_credential, do_rotate_credential
from tenants.models import Tenant
from tenants.tasks import deliver_credentials
from tests.support.billing.books import rate_card
from tests.support.billing.execution_costs import cost_card
from tests.support.rows import unscoped
from tests.support.upstreams.platform import eventually, upstream_platform
from tests.support.upstreams.protocol_server import ProtocolServer

pytestmark = pytest.mark.timeout(300)
PLATFORMS, TENANTS, ROTATED = "sk-of-the-platform-01234", "sk-of-the-tenant-0123456", "sk-rotated-0123456789"


@pytest.fixture
def server() -> Iterator[ProtocolServer]:
    server = ProtocolServer()
    yield server
    server.close()


def test_a_tenants_own_credential_replaces_the_platforms(
    broker: redis.Redis, database: str, secret: str, server: ProtocolServer
) -> None:
    rate_card("gpt")
    cost_card("gpt")
    ours = do_create_credential(None, "openai", PLATFORMS)
    with upstream_platform(broker, database, secret) as platform:
        platform.deploy(
            {"gpt": UpstreamSpec(UpstreamEngine.OPENAI, server.url, "gpt-x", "openai", ours.pk, allow_internal=True)}
        )

        def is_sent_with(expected: str) -> bool:
            deliver_credentials()  # as the web jobs do every two seconds
            body = {"model": "gpt", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
            answer = platform.client.post("/v1/chat/completions", json=body)
            return answer.status_code == 200 and server.received[-1].headers["authorization"] == f"Bearer {expected}"

        eventually(lambda: is_sent_with(PLATFORMS))
        (tenant,) = unscoped(Tenant).all()
        own = do_create_credential(tenant, "own", TENANTS, model_names=["gpt"])
        own_id = own.pk
        eventually(lambda: is_sent_with(TENANTS))
        do_rotate_credential(own, ROTATED)
        eventually(lambda: is_sent_with(ROTATED))
        do_remove_credential(own)
        eventually(lambda: is_sent_with(PLATFORMS))

        def has_cost(of: int) -> set[bool]:
            rows = unscoped(ExecutionCost).filter(credential_id=of)
            return {row.cost_femto > 0 for row in rows if row.is_tenant_credential == (of == own_id)}

        eventually(lambda: (has_cost(ours.pk), has_cost(own_id)) == ({True}, {False}))
