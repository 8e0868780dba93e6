"""What the client programs share: the features' names, the platform's addresses, and the report on each feature.

A program calls `run` with a function for each feature that its client offers. `run` prints one JSON line per feature.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

URL = os.environ["MATRIX_URL"]
OPENAI_URL = f"{URL}/v1"
KEY = os.environ["MATRIX_KEY"]
LIMITED_KEY = os.environ["MATRIX_LIMITED_KEY"]  # its limit is exhausted
MODEL = os.environ["MATRIX_MODEL"]  # answers by itself
SCRIPTED = os.environ["MATRIX_SCRIPTED_MODEL"]  # plays scripts
EMBEDDING_MODEL = os.environ["MATRIX_EMBEDDING_MODEL"]
FEATURE_SECONDS = 60
HELLO = "Tell me a long story about a river."
CALLS = [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})]  # of the script `parallel`
REASONING = ("Paris is in France.", "Paris is the capital of France.")  # of the script `reasoning`, with its answer
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CITY_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "population": {"type": "integer"}},
    "required": ["name", "population"],
    "additionalProperties": False,
}
CITY = {"name": "Paris", "population": 2100000}  # of the script `city`


def script(name: str) -> str:
    """Return a prompt that the scripted model answers with the script."""
    return f"Answer by the script [[{name}]]."


def errors(call: Callable[..., Any], *, statuses: tuple[int, ...] = (400, 401, 404, 429, 503)) -> dict[str, Any]:
    """Return a feature for each class of errors. `call` takes key, model, prompt and max_tokens, and sends them."""
    usual = {"key": KEY, "model": SCRIPTED, "prompt": script("plain"), "max_tokens": 20}
    changes = {
        400: {"max_tokens": 10**7},
        401: {"key": "sk-mr-wrong"},
        404: {"model": "missing"},
        429: {"key": LIMITED_KEY},
        503: {"prompt": script("overloaded")},
    }

    def feature(status: int) -> Callable[[], None]:
        def check() -> None:
            try:
                result = call(**usual | changes[status])
                if inspect.isawaitable(result):
                    asyncio.run(_wait(result))
            except Exception as exc:  # noqa: BLE001  (each client has its own exceptions)
                accepted = (503, 529) if status == 503 else (status,)  # 529 is Anthropic's status for the same
                found = [_status(each) for each in _chain(exc)]
                text = " ".join(str(each) for each in _chain(exc))
                assert any(each in found or str(each) in text for each in accepted), repr(exc)
            else:
                raise AssertionError("no error")

        return check

    return {f"error {status}": feature(status) for status in statuses}


def run(features: dict[str, Callable[[], Any]]) -> None:
    """Run the features, and print the result of each."""
    signal.signal(signal.SIGALRM, _raise_timeout)
    only = sys.argv[1:]
    for name, feature in features.items():
        if only and name not in only:
            continue
        reason = None
        signal.alarm(FEATURE_SECONDS)
        try:
            result = feature()
            if inspect.isawaitable(result):
                asyncio.run(_wait(result))
        except Exception as exc:  # noqa: BLE001  (the next features are independent)
            reason = f"{type(exc).__name__}: {exc}"[:2000]
            traceback.print_exc()
        finally:
            signal.alarm(0)
        print(f"\n{json.dumps({'feature': name, 'failed': reason})}", flush=True)  # noqa: T201  (after unfinished lines)


async def _wait(result: Any) -> Any:
    return await result


def _raise_timeout(*_: Any) -> None:
    raise TimeoutError(f"it took more than {FEATURE_SECONDS} seconds")


def _chain(exc: BaseException | None) -> Iterator[BaseException]:
    seen = set()
    while exc is not None and id(exc) not in seen:  # CrewAI's errors are their own contexts
        seen.add(id(exc))
        yield exc
        exc = exc.__cause__ or exc.__context__


def _status(exc: BaseException) -> int | None:
    response = getattr(exc, "response", None)
    return getattr(exc, "status_code", None) or getattr(response, "status_code", None)
