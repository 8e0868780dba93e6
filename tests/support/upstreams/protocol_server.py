"""A server that plays the documented event sequences of OpenAI's and Anthropic's APIs, with faults."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

USAGE = {"prompt": 11, "cached": 3, "written": 0, "output": 7, "reasoning": 0}


@dataclass
class Answer:
    """One response. Texts are sent word by word."""

    text: str = "Hello from upstream"
    reasoning: str = ""
    signature: str = "sig-of-the-provider"
    calls: tuple[tuple[str, str], ...] = ()  # names and arguments
    finish: str = "stop"  # in OpenAI's words
    stop_sequence: str | None = None
    usage: dict[str, int] | None = field(default_factory=lambda: dict(USAGE))
    raw_usages: list[Any] | None = None  # sent instead, in turn; the first one of a message with its start
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    error: dict[str, Any] | None = None  # of a response with another status, or an event within the stream
    cut_after: int | None = None  # events, after which the connection is closed
    malformed_after: int | None = None  # events, after which a chunk is no JSON
    error_after: int | None = None  # events, after which `error` is sent
    waits: threading.Event | None = None  # before the headers
    holds: threading.Event | None = None  # after the first word of an answer without reasoning
    has_done: bool = True


@dataclass(frozen=True)
class Received:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


class ProtocolServer:
    """The server, in a thread. It gives the answers in `answers` in turn, then `default`."""

    def __init__(self) -> None:
        self.answers: deque[Answer] = deque()
        self.default = Answer()
        self.models: list[str] = []  # in the response to GET /models
        self.secret = ""  # the only API key that may list the models; empty: all may
        self.received: list[Received] = []
        self.connections = 0
        self.open_streams = 0
        self.max_open_streams = 0
        self.disconnected = threading.Event()  # a client has left before the end
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self.port = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(20)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=2048))
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._respond(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            self.disconnected.set()
        finally:
            writer.close()

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.IncompleteReadError:
            return False
        first, *lines = head.split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        body = json.loads(await reader.readexactly(int(headers.get("content-length", "0"))) or b"{}")
        path = first.split(" ")[1]
        self.received.append(Received(path, headers, body))
        answer = self.answers.popleft() if self.answers else self.default
        if answer.waits is not None:
            await asyncio.to_thread(answer.waits.wait, 30)
        if answer.status != 200:
            payload = json.dumps({"error": answer.error or {"message": "no", "type": "error"}}).encode()
            await _write_head(writer, answer, "application/json", len(payload))
            writer.write(payload)
            await writer.drain()
            return True
        if path.partition("?")[0].endswith("/models"):
            await self._list_models(writer, headers)
            return True
        if path.endswith("/embeddings"):
            payload = json.dumps(_vectors(body, answer)).encode()
            await _write_head(writer, answer, "application/json", len(payload))
            writer.write(payload)
            await writer.drain()
            return True
        assert body["stream"] is True
        make = anthropic_events if path.endswith("/messages") else openai_events
        await _write_head(writer, answer, "text/event-stream", None)
        self.open_streams += 1
        self.max_open_streams = max(self.max_open_streams, self.open_streams)
        try:
            return await self._stream(reader, writer, answer, make(answer, body))
        finally:
            self.open_streams -= 1

    async def _list_models(self, writer: asyncio.StreamWriter, headers: dict[str, str]) -> None:
        key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        if self.secret and key != self.secret:
            answer, content = Answer(status=401), {"error": {"message": f"Incorrect API key provided: {key}"}}
        else:
            answer, content = Answer(), {"data": [{"id": name, "object": "model"} for name in self.models]}
        payload = json.dumps(content).encode()
        await _write_head(writer, answer, "application/json", len(payload))
        writer.write(payload)
        await writer.drain()

    async def _stream(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Answer, events: list[tuple[str, Any]]
    ) -> bool:
        leaving = asyncio.ensure_future(reader.read(1))
        first_text = 3 if events[0][0] == "message_start" else 1
        for number, (name, event) in enumerate(events):
            if number == answer.cut_after:
                leaving.cancel()
                return False
            if number == answer.malformed_after:
                event = '{"id": "x", "choices": [{'
            if number == answer.error_after:
                name, event = "error", {"type": "error", "error": answer.error}
            text = event if isinstance(event, str) else json.dumps(event)
            data = (f"event: {name}\n" if name else "") + f"data: {text}\n\n"
            writer.write(f"{len(data.encode()):x}\r\n{data}\r\n".encode())
            await writer.drain()
            if answer.holds is not None and number == first_text:
                held = asyncio.ensure_future(asyncio.to_thread(answer.holds.wait, 30))
                await asyncio.wait([held, leaving], return_when=asyncio.FIRST_COMPLETED)
                if leaving.done():
                    self.disconnected.set()
                    answer.holds.set()
                    return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        leaving.cancel()
        try:
            await leaving
        except asyncio.CancelledError:
            return True
        except ConnectionError:
            return False
        return False


async def _write_head(writer: asyncio.StreamWriter, answer: Answer, content_type: str, length: int | None) -> None:
    fields = {"content-type": content_type, **answer.headers}
    fields |= {"transfer-encoding": "chunked"} if length is None else {"content-length": str(length)}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    writer.write(f"HTTP/1.1 {answer.status} X\r\n{lines}\r\n".encode())
    await writer.drain()


def words(text: str) -> list[str]:
    """Return the text in pieces that end with a space."""
    return [piece for piece in text.replace(" ", " \0").split("\0") if piece]


def openai_events(answer: Answer, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the events of a chat completion, or of a completion."""

    def chunk(delta: dict[str, Any], finish: str | None = None, index: int = 0) -> tuple[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": finish}
        if "prompt" in body:
            choice = {"index": index, "text": delta.get("content", ""), "finish_reason": finish}
        return "", {"id": "c1", "object": "chat.completion.chunk", "model": body["model"], "choices": [choice]}

    events = []
    for index in range(body.get("n") or 1):
        events.append(chunk({"role": "assistant", "content": ""}, None, index))
        events += [chunk({"reasoning_content": piece}, None, index) for piece in words(answer.reasoning)]
        events += [chunk({"content": piece}, None, index) for piece in words(answer.text)]
        for number, (name, arguments) in enumerate(answer.calls):
            function = {"name": name, "arguments": ""}
            call = {"index": number, "id": f"call_{number}", "type": "function", "function": function}
            events.append(chunk({"tool_calls": [call]}, None, index))
            for piece in words(arguments):
                part = {"index": number, "function": {"arguments": piece}}
                events.append(chunk({"tool_calls": [part]}, None, index))
        finish = "tool_calls" if answer.calls and answer.finish == "stop" else answer.finish
        events.append(chunk({}, finish, index))
    if answer.raw_usages is not None:
        events += [("", {"id": "c1", "choices": [], "usage": usage}) for usage in answer.raw_usages]
    elif answer.usage is not None and (body.get("stream_options") or {}).get("include_usage"):
        usage = {
            "prompt_tokens": answer.usage["prompt"],
            "completion_tokens": answer.usage["output"],
            "total_tokens": answer.usage["prompt"] + answer.usage["output"],
            "prompt_tokens_details": {"cached_tokens": answer.usage["cached"]},
            "completion_tokens_details": {"reasoning_tokens": answer.usage["reasoning"]},
        }
        events.append(("", {"id": "c1", "object": "chat.completion.chunk", "choices": [], "usage": usage}))
    return [*events, ("", "[DONE]")] if answer.has_done else events


def anthropic_events(answer: Answer, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the events of a message."""
    usage: dict[str, Any] = {}
    if answer.usage is not None:
        cached, written = answer.usage["cached"], answer.usage["written"]
        usage = {
            "input_tokens": answer.usage["prompt"] - cached - written,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": written,
            "output_tokens": 1,
        }
    start, *rest = answer.raw_usages or [usage]
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": body["model"], "content": []}
    events: list[tuple[str, Any]] = [
        ("message_start", {"type": "message_start", "message": {**message, "usage": start}})
    ]
    blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    if answer.reasoning:
        thoughts = [{"type": "thinking_delta", "thinking": piece} for piece in words(answer.reasoning)]
        signature = {"type": "signature_delta", "signature": answer.signature}
        blocks.append(({"type": "thinking", "thinking": "", "signature": ""}, [*thoughts, signature]))
    if answer.text:
        texts = [{"type": "text_delta", "text": piece} for piece in words(answer.text)]
        blocks.append(({"type": "text", "text": ""}, texts))
    for number, (name, arguments) in enumerate(answer.calls):
        parts = [{"type": "input_json_delta", "partial_json": piece} for piece in ["", *words(arguments)]]
        blocks.append(({"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": {}}, parts))
    for index, (block, deltas) in enumerate(blocks):
        start = {"type": "content_block_start", "index": index, "content_block": block}
        events += [("content_block_start", start), ("ping", {"type": "ping"})]
        for delta in deltas:
            events.append(("content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta}))
        events.append(("content_block_stop", {"type": "content_block_stop", "index": index}))
    reason = {"stop": "end_turn", "length": "max_tokens", "content_filter": "refusal"}[answer.finish]
    if answer.calls and answer.finish == "stop":
        reason = "tool_use"
    if answer.stop_sequence is not None:
        reason = "stop_sequence"
    delta = {"stop_reason": reason, "stop_sequence": answer.stop_sequence}
    finals: list[dict[str, Any]] = [{"usage": usage} for usage in rest]
    if answer.raw_usages is None:
        finals = [{} if answer.usage is None else {"usage": {"output_tokens": answer.usage["output"]}}]
    events += [("message_delta", {"type": "message_delta", "delta": delta, **final}) for final in finals]
    return [*events, ("message_stop", {"type": "message_stop"})] if answer.has_done else events


def _vectors(body: dict[str, Any], answer: Answer) -> dict[str, Any]:
    inputs = body["input"] if isinstance(body["input"], list) else [body["input"]]
    data = [{"object": "embedding", "index": n, "embedding": [float(n), 0.5, -0.25]} for n in range(len(inputs))]
    tokens = 0 if answer.usage is None else answer.usage["prompt"]
    usage: dict[str, Any] = {}
    if answer.raw_usages is not None:
        usage = {"usage": answer.raw_usages[-1]}
    elif answer.usage is not None:
        usage = {"usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
    return {"object": "list", "data": data, "model": body["model"], **usage}
