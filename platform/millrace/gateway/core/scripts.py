"""Lua scripts of many requests, sent to Valkey in one pipeline, which is several times cheaper than single calls."""

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
    result: asyncio.Future[Any]


class ScriptBatch:
    """A queue of script calls: sent immediately while Valkey is idle, or else together with the next calls."""

    def __init__(self, broker: redis.Redis) -> None:
        self._broker = broker
        self._calls: list[_ScriptCall] = []
        self._sending: asyncio.Task[None] | None = None

    async def run(self, script: AsyncScript, keys: Sequence[Any], arguments: Sequence[Any]) -> Any:
        """Run the script and return its result. The script runs even if its caller is cancelled.

        Raises:
            RedisError: Valkey did not respond, or the script failed.
        """
        call = _ScriptCall(script, keys, arguments, asyncio.get_running_loop().create_future())
        self._calls.append(call)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        return await call.result

    async def _send(self) -> None:
        try:
            while self._calls:
                calls, self._calls = self._calls[:MAX_SCRIPTS_PER_PIPELINE], self._calls[MAX_SCRIPTS_PER_PIPELINE:]
                try:
                    results = await self._run_together(calls)
                except (redis.RedisError, OSError) as exc:
                    results = [redis.ConnectionError(str(exc))] * len(calls)
                for call, result in zip(calls, results, strict=True):
                    if call.result.done():
                        continue
                    if isinstance(result, BaseException):
                        call.result.set_exception(result)
                    else:
                        call.result.set_result(result)
        finally:
            self._sending = None

    async def _run_together(self, calls: Sequence[_ScriptCall]) -> list[Any]:
        async with self._broker.pipeline(transaction=False) as pipe:
            for call in calls:
                pipe.execute_command("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.arguments)
            results = await pipe.execute(raise_on_error=False)
        for index, answer in enumerate(results):
            if isinstance(answer, NoScriptError):  # Valkey was restarted; this call loads the script
                results[index] = await calls[index].script(keys=calls[index].keys, args=calls[index].arguments)
        return results
