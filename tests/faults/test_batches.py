"""Batches while processes of the platform are killed."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from datetime import UTC, datetime

import openai
import pytest

from tests.support.e2e.batches import ENDED, line, results, upload, usage_events
from tests.support.stack import Stack, eventually


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_a_batch_survives_killed_processes(stack: Stack, count: int) -> None:
    """Each line has one result and one charge, whichever process dies."""
    stack.wait_until_ready()
    client = stack.client(timeout=60)
    lines = [line(f"n{n}", max_tokens=2 + n % 7, ignore_eos=True) for n in range(count)]
    began = datetime.now(UTC)
    batch = client.batches.create(
        input_file_id=upload(client, lines), endpoint="/v1/chat/completions", completion_window="24h"
    )
    victims = itertools.cycle([("uvicorn",), ("inference_worker",), ("millrace.conf.web_jobs",)])

    def ended() -> bool:
        try:
            return client.batches.retrieve(batch.id).status in ENDED
        except openai.APIError:
            return False

    killed = 0
    give_up_at = time.monotonic() + 2000
    while not ended():
        assert time.monotonic() < give_up_at
        if killed < 5:
            time.sleep(3)
            with contextlib.suppress(LookupError, ProcessLookupError):
                os.kill(stack.pid(*next(victims)), signal.SIGKILL)
                killed += 1
        time.sleep(0.5)
    assert killed >= 4
    stack.wait_until_ready()
    batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed", batch
    answered = results(client, batch.output_file_id)
    assert results(client, batch.error_file_id) == {}
    assert set(answered) == {f"n{n}" for n in range(count)}
    tokens = {
        each["response"]["request_id"]: each["response"]["body"]["usage"]["completion_tokens"]
        for each in answered.values()
    }
    assert len(tokens) == count
    assert sum(tokens.values()) == sum(2 + n % 7 for n in range(count))

    def paid() -> dict[str, int]:
        """Return the output tokens by request. A request that waited for a worker for too long never ran; its line was
        retried as another request, and its event has no tokens."""
        since = [each for each in usage_events(stack) if datetime.fromisoformat(each["admitted_at"]) >= began]
        paid = [each for each in since if each["outcome"] != "failed" and any(each["tokens"].values())]
        return {each["request_id"]: each["tokens"]["output"] for each in paid}

    eventually(lambda: paid().keys() >= tokens.keys(), 180)
    assert paid() == tokens
