"""Conversations with tools that other platforms run: read as text or as call and result, else dropped and named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from inference_worker.contract.upstreams import UpstreamEngine, UpstreamSpec
from millrace.gateway.core.catalog import upstream_model
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest
from millrace.gateway.protocols.dialect_readers import READERS
from millrace.gateway.protocols.prompts import tokenize_here
from tests.support.gateway.inference_requests import read_for_upstream
from tests.support.gateway.requests import BODIES, HELLO

CHAT, RESPONSES, MESSAGES = "openai.chat", "openai.responses", "anthropic.messages"
CHOICES = {CHAT: "auto", RESPONSES: "auto", MESSAGES: {"type": "auto"}}
REQUIRED = {CHAT: "required", RESPONSES: "required", MESSAGES: {"type": "any"}}
TOOLS = {
    CHAT: {"type": "function", "function": {"name": "now"}},
    RESPONSES: {"type": "function", "name": "now"},
    MESSAGES: {"name": "now", "input_schema": {"type": "object"}},
}
FOREIGN_TOOLS: list[tuple[str, dict[str, Any]]] = [
    *((RESPONSES, {"type": type_}) for type_ in ("web_search", "web_search_preview_2025_03_11", "file_search", "mcp")),
    *((RESPONSES, {"type": type_}) for type_ in ("code_interpreter", "computer_use_preview", "local_shell", "shell")),
    *((RESPONSES, {"type": type_}) for type_ in ("apply_patch", "image_generation", "tool_search", "computer")),
    (RESPONSES, {"type": "custom", "name": "sql", "format": {"type": "grammar", "syntax": "lark", "definition": "a"}}),
    *((CHAT, {"type": type_}) for type_ in ("web_search", "code_interpreter", "mcp", "browser_search", "retrieval")),
    (CHAT, {"type": "custom", "custom": {"name": "sql"}}),
    (CHAT, {"type": "code_execution_20250825", "name": "code_execution"}),
    *(
        (MESSAGES, {"type": type_, "name": type_})
        for type_ in (
            *("web_search_20250305", "web_fetch_20250910", "code_execution_20250825", "bash_20250124"),
            *("text_editor_20250728", "computer_20250124", "memory_20250818", "tool_search_tool_regex_20251119"),
        )
    ),
    (MESSAGES, {"type": "mcp_toolset", "mcp_server_name": "a"}),
]


def read(dialect: str, **fields: Any) -> InferenceRequest:
    return READERS[dialect](msgspec.json.encode({"model": "m", **BODIES[dialect], **fields}))


@pytest.mark.parametrize(("dialect", "tool"), FOREIGN_TOOLS, ids=lambda value: str(value)[:40])
def test_a_tool_of_another_platform_is_dropped_and_named(dialect: str, tool: dict[str, Any]) -> None:
    only = read(dialect, tools=[tool], tool_choice=CHOICES[dialect])
    assert (only.tools, only.analysis.ignored, only.analysis.unknown) == ((), (f"tools[].{tool['type']}",), ())
    both = read(dialect, tools=[TOOLS[dialect], tool], tool_choice=REQUIRED[dialect])
    assert [each.name for each in both.tools] == ["now"]
    with pytest.raises(ApiError) as exc_info:
        read(dialect, tools=[tool], tool_choice=REQUIRED[dialect])
    assert exc_info.value.param == "tool_choice"


def test_a_choice_between_foreign_tools_only() -> None:
    foreign = [{"type": "web_search"}]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": foreign}
    assert read(RESPONSES, tools=[TOOLS[RESPONSES], *foreign], tool_choice=allowed).tool_choice == "none"
    chat_allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": foreign}}
    assert read(CHAT, tools=[TOOLS[CHAT], *foreign], tool_choice=chat_allowed).tool_choice == "none"
    for named in ({"type": "web_search"}, {**allowed, "mode": "required"}):
        with pytest.raises(ApiError):
            read(RESPONSES, tools=[TOOLS[RESPONSES], *foreign], tool_choice=named)


CUSTOM_CALL = {"id": "c", "type": "custom", "custom": {"name": "sql", "input": "SELECT 1"}}
# The parts of a conversation, the prompt's messages (role and text, or the name of the call), and the ignored fields.
Case = tuple[str, list[dict[str, Any]], list[tuple[str, str]], set[str]]


def turn(role: str, *parts: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def block(type_: str, **fields: Any) -> dict[str, Any]:
    return {"type": type_, **fields}


TEXT = block("text", text="Found it.")
CONVERSATIONS: dict[str, Case] = {
    "chat custom call": (
        CHAT,
        [{"role": "assistant", "tool_calls": [CUSTOM_CALL]}, {"role": "tool", "tool_call_id": "c", "content": "1"}],
        [("assistant", "sql"), ("tool", "1")],
        set(),
    ),
    "chat hosted call": (
        CHAT,
        [
            {"role": "assistant", "content": None, "tool_calls": [{"id": "w", "type": "web_search", "web_search": {}}]},
            {"role": "tool", "tool_call_id": "w", "content": "x"},
        ],
        [("assistant", "")],
        {"messages[].tool_calls[].web_search"},
    ),
    "chat texts of Responses": (
        CHAT,
        [
            turn("user", block("input_text", text="a")),
            turn("assistant", block("output_text", text="b", annotations=[])),
        ],
        [("user", "a"), ("assistant", "b")],
        set(),
    ),
    "chat blocks of Messages": (
        CHAT,
        [
            turn("assistant", block("thinking", thinking="x"), block("tool_use", id="t", name="now", input={"a": 1})),
            turn("user", block("tool_result", tool_use_id="t", content=[block("text", text="noon")]), TEXT),
        ],
        [("assistant", "now"), ("tool", "noon"), ("user", "Found it.")],
        {"messages[].content[].thinking"},
    ),
    "chat server tools of Messages": (
        CHAT,
        [turn("assistant", block("server_tool_use", id="s"), block("web_search_tool_result", tool_use_id="s"), TEXT)],
        [("assistant", "Found it.")],
        {"messages[].content[].server_tool_use", "messages[].content[].web_search_tool_result"},
    ),
    "messages search without results": (
        MESSAGES,
        [
            turn(
                "assistant",
                block("server_tool_use", id="s", name="web_search", input={"query": "x"}),
                block("web_search_tool_result", tool_use_id="s", content=[]),
                TEXT,
            )
        ],
        [("assistant", "Found it.")],
        {"messages[].content[].server_tool_use", "messages[].content[].web_search_tool_result"},
    ),
    "messages search": (
        MESSAGES,
        [
            turn(
                "assistant",
                block("server_tool_use", id="s", name="web_search", input={"query": "x"}),
                block(
                    "web_search_tool_result",
                    tool_use_id="s",
                    content=[block("web_search_result", title="T", url="https://x", encrypted_content="secret")],
                ),
                TEXT,
            )
        ],
        [("assistant", "web_search"), ("tool", "T\nhttps://x"), ("assistant", "Found it.")],
        {"messages[].content[].server_tool_use", "messages[].content[].web_search_tool_result"},
    ),
    "messages MCP": (
        MESSAGES,
        [
            turn(
                "assistant",
                block("mcp_tool_use", id="m", name="echo", server_name="a", input={}),
                block("mcp_tool_result", tool_use_id="m", is_error=False, content=[block("text", text="hi")]),
            )
        ],
        [("assistant", "echo"), ("tool", "hi")],
        set(),
    ),
    "messages code execution": (
        MESSAGES,
        [
            turn(
                "assistant",
                block("server_tool_use", id="b", name="bash_code_execution", input={"command": "ls"}),
                block(
                    "bash_code_execution_tool_result",
                    tool_use_id="b",
                    content=block("bash_code_execution_result", stdout="a.txt", stderr="", return_code=0, content=[]),
                ),
            )
        ],
        [("assistant", "bash_code_execution"), ("tool", "a.txt")],
        {"messages[].content[].server_tool_use", "messages[].content[].bash_code_execution_tool_result"},
    ),
    "messages other blocks": (
        MESSAGES,
        [
            turn("assistant", block("compaction", content="Summary.")),
            turn("user", block("container_upload", file_id="f")),
            turn("user", TEXT),
        ],
        [("assistant", "Summary."), ("user", ""), ("user", "Found it.")],
        {"messages[].content[].container_upload"},
    ),
    "messages results of client tools": (
        MESSAGES,
        [
            turn("assistant", block("tool_use", id="t", name="find", input={})),
            turn(
                "user",
                block(
                    "tool_result",
                    tool_use_id="t",
                    content=[
                        block("search_result", source="https://x", title="T", content=[block("text", text="body")]),
                        block("tool_reference", tool_name="x"),
                    ],
                ),
                block("document", title="D", source=block("text", media_type="text/plain", data="page")),
            ),
        ],
        [("assistant", "find"), ("tool", "T\nhttps://x\nbody\n"), ("user", "D\npage\n")],
        {"messages[].content[].content[].tool_reference"},
    ),
    "responses hosted items": (
        RESPONSES,
        [
            block("web_search_call", id="ws", status="completed", action=block("search", query="x")),
            block("image_generation_call", id="ig", result="iVBOR"),
            block("mcp_list_tools", id="l", server_label="a", tools=[]),
            block("mcp_approval_request", id="a", name="n", arguments="{}", server_label="a"),
            block("mcp_approval_response", approval_request_id="a", approve=True),
            block("computer_call", id="cc", call_id="cc", action=block("click", x=1, y=2)),
            block("computer_call_output", call_id="cc", output=block("computer_screenshot", image_url="data:")),
            block("compaction", id="cm", encrypted_content="x"),
            block("tool_search_call", call_id=None, arguments={}, status="completed"),
            block("tool_search_output", call_id=None, tools=[]),
        ],
        [],
        {
            f"input[].{name}"
            for name in (
                *("web_search_call", "image_generation_call", "mcp_list_tools", "mcp_approval_request"),
                *("mcp_approval_response", "computer_call", "computer_call_output", "compaction"),
                *("tool_search_call", "tool_search_output"),
            )
        },
    ),
    "responses custom call": (
        RESPONSES,
        [
            block("custom_tool_call", call_id="c", name="sql", input="SELECT 1", id="ctc"),
            block("custom_tool_call_output", call_id="c", output="1"),
        ],
        [("assistant", "sql"), ("tool", "1")],
        set(),
    ),
    "responses MCP call": (
        RESPONSES,
        [block("mcp_call", id="m", name="echo", arguments="{}", server_label="a", output="hi", error=None)],
        [("assistant", "echo"), ("tool", "hi")],
        set(),
    ),
    "responses shells and search": (
        RESPONSES,
        [
            block("local_shell_call", call_id="l", id="l1", action=block("exec", command=["ls"])),
            block("local_shell_call_output", call_id="l", output="a.txt"),
            block("shell_call", call_id="s", action={"commands": ["pwd"]}),
            block("shell_call_output", call_id="s", output=[{"stdout": "/", "stderr": "", "outcome": block("exit")}]),
            block("apply_patch_call", call_id="p", operation=block("delete_file", path="a")),
            block("apply_patch_call_output", call_id="p", status="completed", output="done"),
            block("file_search_call", id="f", queries=["q"], results=[{"filename": "a.md", "text": "body"}]),
            block("code_interpreter_call", id="ci", code="1+1", outputs=[block("logs", logs="2")]),
        ],
        [
            *(("assistant", "local_shell"), ("tool", "a.txt"), ("assistant", "shell"), ("tool", "/")),
            *(("assistant", "apply_patch"), ("tool", "done"), ("assistant", "file_search"), ("tool", "a.md\nbody")),
            *(("assistant", "code_interpreter"), ("tool", "2")),
        ],
        {f"input[].{name}_call" for name in ("local_shell", "shell", "apply_patch", "file_search", "code_interpreter")},
    ),
    "responses texts of chat": (
        RESPONSES,
        [turn("user", TEXT), turn("assistant", block("reasoning_text", text="x"), block("output_text", text="b"))],
        [("user", "Found it."), ("assistant", "b")],
        {"input[].content[].reasoning_text"},
    ),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_of_another_platform_is_read(name: str) -> None:
    dialect, turns, expected, ignored = CONVERSATIONS[name]
    field = "input" if dialect == RESPONSES else "messages"
    request = read(dialect, **{field: [*HELLO, *turns, {"role": "user", "content": "Go on."}]})
    first, *middle, last = [message for message in request.prompt if isinstance(message, dict)]
    assert (first, last) == (HELLO[0], {"role": "user", "content": "Go on."})
    found = [
        (
            message["role"],
            message["tool_calls"][0]["function"]["name"] if "tool_calls" in message else message["content"],
        )
        for message in middle
    ]
    assert (found, set(request.analysis.ignored), request.analysis.unknown) == (expected, ignored, ())


def test_a_calls_input_is_its_argument() -> None:
    request = read(CHAT, messages=[*HELLO, {"role": "assistant", "tool_calls": [CUSTOM_CALL]}])
    message = request.prompt[-1]
    assert isinstance(message, dict)
    assert message["tool_calls"][0]["function"] == {"name": "sql", "arguments": {"input": "SELECT 1"}}


@pytest.mark.parametrize(
    ("dialect", "part"),
    [
        (CHAT, block("hologram", data="x")),
        (CHAT, block("image_url")),
        (RESPONSES, block("hologram")),
        (MESSAGES, block("hologram")),
        (MESSAGES, block("document", source=block("base64", media_type="application/pdf", data="JVBE"))),
    ],
)
def test_other_unknown_parts_are_refused(dialect: str, part: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as exc_info:
        read(dialect, **{"input" if dialect == RESPONSES else "messages": [turn("user", part)]})
    assert exc_info.value.status == 400


def test_an_upstream_receives_no_choice_between_tools_that_were_dropped() -> None:
    upstream = upstream_model("m", "", UpstreamSpec(UpstreamEngine.ANTHROPIC, "https://a.example", "m", "anthropic"))
    fields = {"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "auto"}}
    body = msgspec.json.encode({"model": "m", **BODIES[MESSAGES], **fields})
    request = read_for_upstream(MESSAGES, body)
    sent = tokenize_here(upstream, request).upstream
    assert sent is not None
    assert not {"tools", "tool_choice"} & msgspec.json.decode(sent.body).keys()
