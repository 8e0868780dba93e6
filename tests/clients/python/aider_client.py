"""Aider's command line, without a terminal. It calls no tools: it reads changes of files from the answer's text."""

import re
import subprocess
import sys
from pathlib import Path

from features import *

AIDER = Path(sys.executable).with_name("aider")
SETTINGS = (
    "--no-git",
    "--yes-always",
    "--no-pretty",
    "--no-check-update",
    "--no-show-model-warnings",
    "--analytics-disable",
)
STATUSES = {"AuthenticationError": 401, "NotFoundError": 404, "RateLimitError": 429, "ServiceUnavailableError": 503}
ERROR = re.compile(rf"litellm\.({'|'.join(STATUSES)}):")
ANSWER = "Paris is the capital of France."


class RequestFailed(Exception):
    def __init__(self, status_code):
        super().__init__(str(status_code))
        self.status_code = status_code


def ask(prompt, key=KEY, model=SCRIPTED, stream=True, until=None):
    """Return what the command prints. It ends with the first error, which the command would retry, or with `until`."""
    connection = ["--openai-api-base", OPENAI_URL, "--openai-api-key", key, "--model", f"openai/{model}"]
    command = [str(AIDER), *connection, *SETTINGS, "--stream" if stream else "--no-stream", "--message", prompt]
    printed = ""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            while piece := process.stdout.read(1):
                printed += piece
                if found := ERROR.search(printed):
                    raise RequestFailed(STATUSES[found[1]])
                if until is not None and until in printed:
                    return printed
        finally:
            process.kill()
    return printed


def plain():
    assert ANSWER in ask(script("plain"), stream=False)


def stream():
    printed = ask(script("plain"))
    assert ANSWER in printed
    assert re.search(r"Tokens: \d+ sent, 7 received", printed), printed


def abort():
    ask(script("long"), until="word word word")


def call(key, model, prompt, max_tokens):
    return ask(prompt, key, model)


run({"plain": plain, "stream": stream, **errors(call, statuses=tuple(STATUSES.values())), "abort": abort})
