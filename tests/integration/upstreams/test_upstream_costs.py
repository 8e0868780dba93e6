"""Costs and charges of an upstream's usage and faults, through real processes."""

from __future__ import annotations

import httpx2
import psycopg
import pytest
import redis

from billing.models import ExecutionCost, UsageEvent, UsageQuarantine
from inference_worker.contract.upstreams import UpstreamEngine, UpstreamSpec
from tenants.models import UpstreamCredential
from tests.support.billing.books import dollars, rate_card
from tests.support.billing.execution_costs import cost_card
from tests.support.invariants import assert_ledger_invariants
from tests.support.rows import unscoped
from tests.support.upstreams.platform import eventually, upstream_platform
from tests.support.upstreams.protocol_server import USAGE, Answer, ProtocolServer

pytestmark = pytest.mark.timeout(300)
ANSWERS = {
    "normal": Answer(),
    "no usage": Answer(usage=None),
    "above": Answer(usage=USAGE | {"prompt": 300_000, "cached": 0}),
    "failed": Answer(text="one two three four", error_after=3, error={"message": "broken", "type": "server_error"}),
}


def test_faults_of_an_upstream_are_booked_and_charged_by_the_rules(
    broker: redis.Redis, database: str, secret: str
) -> None:
    for model in ("gpt", "other"):
        rate_card(model)
    cost_card("gpt")
    given = {"name": "k", "ciphertext": b"x", "encryption_key_id": "k", "daily_spend_limit_nano": 10**12}
    credential = unscoped(UpstreamCredential).create(tenant=None, **given).pk
    server, requests = ProtocolServer(), {}
    try:
        with upstream_platform(broker, database, secret, {credential: "sk"}) as platform:
            spec = UpstreamSpec(UpstreamEngine.OPENAI, server.url, "gpt-x", "openai", credential, allow_internal=True)
            platform.deploy({"gpt": spec})

            def ask() -> httpx2.Response:
                body = {
                    "model": "gpt",
                    "messages": [{"role": "user", "content": "Hi"}],
                    "max_tokens": 20,
                    "stream": True,
                }
                return platform.client.post("/v1/chat/completions", json=body)

            for name, answer in ANSWERS.items():
                server.answers.append(answer)
                requests[name] = ask().headers["x-request-id"]
            eventually(lambda: unscoped(UsageEvent).count() == len(ANSWERS))
            with psycopg.connect(database, autocommit=True, options="-c role=millrace_system") as connection:
                connection.execute("UPDATE tenants_upstreamcredential SET daily_spend_limit_nano = 1")
            eventually(lambda: ask().status_code == 429)
            assert ask().json()["error"]["code"] == "upstream_limit_reached"
    finally:
        server.close()
    names = {request_id: name for name, request_id in requests.items()}
    events = {names[row.request_id]: row for row in unscoped(UsageEvent).all() if row.request_id in names}
    costs = {names[row.request_id]: row for row in unscoped(ExecutionCost).all() if row.request_id in names}
    assert unscoped(UsageQuarantine).count() == 0
    assert {name: row.usage_source for name, row in events.items()} == {
        **dict.fromkeys(("normal", "above"), "upstream"),
        **dict.fromkeys(("no usage", "failed"), "estimated"),
    }
    assert costs.keys() == events.keys()
    for row in costs.values():
        assert row.cost_femto == (
            row.uncached * dollars("1") + row.cache_read * dollars("0.10") + row.output * dollars("5")
        )
        assert (row.credential_id, row.is_tenant_credential, row.cost_femto > 0) == (credential, False, True)
    assert (costs["normal"].uncached, costs["normal"].cache_read, costs["normal"].output) == (8, 3, 7)
    assert (events["failed"].outcome, events["failed"].cost_femto) == ("failed", 0)
    above = events["above"]
    assert 0 < above.cost_femto <= above.reserved_nano * 10**6 < costs["above"].unbilled_femto + above.cost_femto
    assert (costs["above"].uncached, costs["above"].output) == (131_072, 7), "no more than the context length"
    assert above.unbilled_tokens == 131_079 - above.uncached - above.output
    assert_ledger_invariants(database)
