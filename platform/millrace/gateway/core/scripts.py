"""Scripts of many requests, sent to the broker together: calls of their own would cost several times as much."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import redis.asyncio as redis
from redis.commands.core import AsyncScript
from redis.exceptions import NoScriptError

MAX_SCRIPTS_PER_PIPELINE = 64


class _ScriptCall(NamedTuple):
    script: AsyncScript
    keys: Sequence[Any]
    arguments: Sequence[Any]
    answer: asyncio.Future[Any]


class ScriptBatch:
    """Runs scripts: at once when the broker is idle, else together with what came while it answered."""

    def __init__(self, broker: redis.Redis) -> None:
        self._broker = broker
        self._calls: list[_ScriptCall] = []
        self._sending: asyncio.Task[None] | None = None

    async def run(self, script: AsyncScript, keys: Sequence[Any], arguments: Sequence[Any]) -> Any:
        """Run the script and return its result. It runs even if its caller no longer waits.

        Raises:
            RedisError: the broker did not answer, or the script failed.
        """
        call = _ScriptCall(script, keys, arguments, asyncio.get_running_loop().create_future())
        self._calls.append(call)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        return await call.answer

    async def _send(self) -> None:
        try:
            while self._calls:
                calls, self._calls = self._calls[:MAX_SCRIPTS_PER_PIPELINE], self._calls[MAX_SCRIPTS_PER_PIPELINE:]
                try:
                    answers = await self._run_together(calls)
                except (redis.RedisError, OSError) as exc:
                    answers = [redis.ConnectionError(str(exc))] * len(calls)
                for call, answer in zip(calls, answers, strict=True):
                    if call.answer.done():
                        continue
                    if isinstance(answer, BaseException):
                        call.answer.set_exception(answer)
                    else:
                        call.answer.set_result(answer)
        finally:
            self._sending = None

    async def _run_together(self, calls: Sequence[_ScriptCall]) -> list[Any]:
        async with self._broker.pipeline(transaction=False) as pipe:
            for call in calls:
                pipe.execute_command("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.arguments)
            answers = await pipe.execute(raise_on_error=False)
        for place, answer in enumerate(answers):
            if isinstance(answer, NoScriptError):  # the broker is new: this loads it
                answers[place] = await calls[place].script(keys=calls[place].keys, args=calls[place].arguments)
        return answers
