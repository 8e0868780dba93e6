"""The requests of Open WebUI, as its server sends them for a connection to an OpenAI-compatible API.

Open WebUI itself is not installed: it needs a browser and several GB. The bodies and headers follow its source.
"""

import asyncio
import json

import aiohttp
from features import *

HEADERS = {"X-OpenWebUI-User-Name": "Ada", "X-OpenWebUI-User-Id": "u-1", "X-OpenWebUI-User-Role": "admin"}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "-", "parameters": PARAMETERS}}


class RequestFailed(Exception):
    def __init__(self, status_code, text):
        super().__init__(text)
        self.status_code = status_code


async def request(method, path, body=None, key=KEY):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **HEADERS}
    async with aiohttp.ClientSession(trust_env=True) as session:
        data = None if body is None else json.dumps(body)
        async with session.request(method, f"{OPENAI_URL}{path}", data=data, headers=headers) as response:
            if response.status >= 400:
                raise RequestFailed(response.status, await response.text())
            if "text/event-stream" not in response.headers["Content-Type"]:
                return await response.json()
            lines = [line.decode().strip() async for line in response.content]
    datas = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert datas.pop() == "[DONE]"
    return [json.loads(data) for data in datas]


def chat(prompt, model=SCRIPTED, **options):
    """Return the body of a chat's request: the parameters of its settings are at the top level."""
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    return {"stream": True, "model": model, "messages": messages, "stream_options": {"include_usage": True}, **options}


def deltas(chunks):
    return [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]


async def plain():
    models = await request("GET", "/models")  # the check of a connection
    assert MODEL in [model["id"] for model in models["data"]]
    title = {"model": MODEL, "messages": [{"role": "user", "content": HELLO}], "stream": False}
    answer = await request("POST", "/chat/completions", {**title, "max_completion_tokens": 8})
    assert answer["choices"][0]["message"]["content"]


async def stream():
    settings = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 1, "max_tokens": 8}
    chunks = await request("POST", "/chat/completions", chat(HELLO, MODEL, repetition_penalty=1.1, **settings))
    assert "".join(delta.get("content") or "" for delta in deltas(chunks))
    assert chunks[-1]["usage"]["completion_tokens"] == 8


async def tools():
    messages = [{"role": "user", "content": script("weather")}]
    found = deltas(await request("POST", "/chat/completions", chat(messages, tools=[TOOL])))
    calls = merged_calls(found)
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls] == CALLS[:1]
    # It sends back what it has merged, with the index.
    messages += [{"role": "assistant", "content": "", "tool_calls": calls}]
    messages += [{"role": "tool", "tool_call_id": calls[0]["id"], "content": "sunny"}]
    found = deltas(await request("POST", "/chat/completions", chat(messages, tools=[TOOL])))
    assert "".join(delta.get("content") or "" for delta in found) == "It is sunny in Paris."


async def parallel():
    found = deltas(await request("POST", "/chat/completions", chat(script("parallel"), tools=[TOOL])))
    calls = merged_calls(found)
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls] == CALLS


def merged_calls(found):
    calls = {}
    for part in (part for delta in found for part in delta.get("tool_calls") or []):
        if part["index"] not in calls:
            calls[part["index"]] = part
        else:
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return list(calls.values())


async def reasoning():
    found = deltas(await request("POST", "/chat/completions", chat(script("reasoning"))))
    texts = ("".join(delta.get(name) or "" for delta in found) for name in ("reasoning_content", "content"))
    assert tuple(texts) == REASONING


async def embeddings():
    answer = await request("POST", "/embeddings", {"model": EMBEDDING_MODEL, "input": ["one", "two"]})
    assert [len(each["embedding"]) for each in answer["data"]] == [384, 384]


async def abort():
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **HEADERS}
    async with aiohttp.ClientSession() as session:
        body = json.dumps(chat(script("long"), max_tokens=4000))
        response = await session.post(f"{OPENAI_URL}/chat/completions", data=body, headers=headers)
        for _ in range(5):
            await response.content.readline()
        response.close()
        await asyncio.sleep(0.1)


def call(key, model, prompt, max_tokens):
    return request("POST", "/chat/completions", chat(prompt, model, max_tokens=max_tokens), key)


run(
    {
        "plain": plain,
        "stream": stream,
        "tools": tools,
        "parallel tools": parallel,
        "reasoning": reasoning,
        "embeddings": embeddings,
        **errors(call),
        "abort": abort,
    }
)
