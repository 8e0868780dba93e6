"""Open WebUI: its server with a connection to the platform, and its pages in headless Chromium."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
from features import *
from playwright.sync_api import expect, sync_playwright

START_SECONDS = 240
PAGE_MILLISECONDS = 30_000
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
SETTINGS = {
    "DATA_DIR": str(Path("data").absolute()),
    "WEBUI_AUTH": "False",
    "OFFLINE_MODE": "True",
    "ENABLE_OLLAMA_API": "False",
    "OPENAI_API_BASE_URL": OPENAI_URL,
    "OPENAI_API_KEY": KEY,
    "DEFAULT_MODELS": SCRIPTED,
    "RAG_EMBEDDING_ENGINE": "openai",
    "RAG_OPENAI_API_BASE_URL": OPENAI_URL,
    "RAG_OPENAI_API_KEY": KEY,
    "RAG_EMBEDDING_MODEL": EMBEDDING_MODEL,
}
ANSWER = "Paris is the capital of France."  # of the script `plain`


@contextlib.contextmanager
def server():
    """Run Open WebUI's server, and return its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("open-webui")), "serve", "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(command, env=os.environ | SETTINGS, stdout=sys.stderr) as process:
        try:
            wait_for(f"http://127.0.0.1:{port}/health", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def wait_for(url, process):
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            httpx.get(url, timeout=5).raise_for_status()
            return
        except httpx.HTTPError:
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, f"the server did not start within {START_SECONDS} s"
            time.sleep(0.5)


class Chat:
    """A new chat in the browser."""

    def __init__(self, browser, url):
        self.page = browser.new_page()
        self.page.set_default_timeout(PAGE_MILLISECONDS)
        self.page.goto(url)
        self.input = self.page.locator("#chat-input")

    def send(self, text):
        self.input.click()
        self.page.keyboard.type(text)
        self.page.keyboard.press("Enter")

    def expect(self, text):
        chat = self.page.get_by_role("region", name="Chat Conversation")
        expect(chat.get_by_text(text, exact=True)).to_be_visible(timeout=PAGE_MILLISECONDS)


def close_release_notes(browser, url):
    """Close the dialog of the first visit."""
    Chat(browser, url).page.get_by_role("button", name="Okay, Let's Go!").click()


def features(browser, url):
    def stream():
        chat = Chat(browser, url)
        chat.send(script("turns"))
        chat.expect("This is the first answer.")
        chat.send("And then?")  # the script's mark is in the first turn only
        chat.expect("This is the second answer.")

    def embeddings():
        Path("note.txt").write_text(f"The note says: {script('plain')}")
        chat = Chat(browser, url)
        chat.page.locator("input[type=file]").first.set_input_files("note.txt")
        chat.send("What does the note say?")  # the script's mark is in the file only
        chat.expect(ANSWER)

    def overloaded():
        chat = Chat(browser, url)
        chat.send(script("overloaded"))
        chat.expect("The script says that the server is overloaded. Retry later.")

    def abort():
        chat = Chat(browser, url)
        chat.send(script("long"))
        expect(chat.page.get_by_text("word word word")).to_be_visible(timeout=PAGE_MILLISECONDS)
        chat.page.get_by_role("button", name="Stop").click()
        expect(chat.page.get_by_role("button", name="Regenerate")).to_be_visible(timeout=PAGE_MILLISECONDS)

    return {"stream": stream, "embeddings": embeddings, "error 503": overloaded, "abort": abort}


program = next(filter(None, map(shutil.which, BROWSERS)), None)
assert program, "Chromium is not installed"
with server() as url, sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
    close_release_notes(browser, url)
    run(features(browser, url))
    browser.close()
