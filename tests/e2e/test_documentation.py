"""The runnable code blocks of the documentation, and the programs in examples/, on the running platform."""

from __future__ import annotations

import os
import re
import runpy
import threading
from datetime import UTC, datetime
from http.server import ThreadingHTTPServer
from pathlib import Path

import httpx2
import pytest

from tests.support.code_blocks import ROOT, Session, blocks_of, replacements_for, run_blocks
from tests.support.stack import Stack
from tests.support.tenants.webhook_receiver import signed_headers

OWN_PLATFORM = ("docs/tutorials/bring-your-model.md",)  # tests/e2e/test_bring_your_model.py runs it
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if any(block.is_runnable for block in blocks_of(page.read_text(encoding="utf-8")))
    and str(page.relative_to(ROOT)) not in OWN_PLATFORM
]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def session(stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """An empty directory with the platform's data directory and `manage.py`, as in a checkout."""
    (tmp_path / ".millrace").symlink_to(stack.data_dir)
    (tmp_path / "manage.py").symlink_to(ROOT / "manage.py")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MILLRACE_", "DJANGO_"))}
    environment["MILLRACE_DATA_DIR"] = str(stack.data_dir)
    for name in ("MILLRACE_API_KEY", "OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        environment[name] = stack.key
        monkeypatch.setenv(name, stack.key)
    return Session(tmp_path, environment, replacements_for(stack.url))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_runnable_blocks_of_a_page_run(page: Path, session: Session) -> None:
    run_blocks(page, session)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("streaming_resume", r"\[connection lost\].*\n\[complete\]"),
        ("tools", r"tool: get_weather -> .*\nanswer: "),
        ("structured_output", r"\{'name': '.*', 'birth_year': \d+, 'field': '\w+'\}"),
        ("prompt_cache", r"read from it \d+\n.*written to the cache 0, read from it [1-9]\d*"),
        ("embeddings_search", r"0\.\d\d  To reset a forgotten PIN.*Cards are replaced"),
        ("batch", r"completed .*Paris -> .*Oslo -> "),
    ],
    ids=lambda value: value if value.isidentifier() else "",
)
def test_an_example_runs(
    name: str, expected: str, stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MILLRACE_URL", stack.url)
    monkeypatch.setenv("MILLRACE_API_KEY", stack.key)
    runpy.run_path(str(ROOT / "examples" / name / "main.py"), run_name="__main__")
    output = capsys.readouterr().out
    assert re.search(expected, output, re.DOTALL), output


def test_the_example_of_budgets_can_be_repeated(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MILLRACE_URL", stack.url)
    monkeypatch.setenv("MILLRACE_API_KEY", stack.key)
    budgets = "Search: $2.00 a day\nSupport: $5.00 a day\n"
    outputs = []
    for _ in range(2):
        runpy.run_path(str(ROOT / "examples" / "budgets" / "main.py"), run_name="__main__")
        outputs.append(capsys.readouterr().out)
    assert re.sub(r"\w+: new key sk-mr-.*\n", "", outputs[0]) == budgets
    assert outputs[1] == budgets


def test_the_example_of_a_webhook_receiver_rejects_forged_events(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = "whsec_" + "A" * 32
    monkeypatch.setenv("WEBHOOK_SECRET", secret)
    example = runpy.run_path(str(ROOT / "examples" / "webhook_receiver" / "main.py"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), example["Receiver"])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        body = b'{"type":"budget.threshold_reached","data":{"percent":80}}'
        headers = signed_headers(secret, "evt_1", datetime.now(UTC), body)
        assert [httpx2.post(url, content=body, headers=headers).status_code for _ in range(2)] == [204, 204]
        assert httpx2.post(url, content=body + b" ", headers=headers).status_code == 401
        old = signed_headers(secret, "evt_2", datetime(2026, 1, 1, tzinfo=UTC), body)
        assert httpx2.post(url, content=body, headers=old).status_code == 401
    finally:
        server.shutdown()
        server.server_close()
    assert capsys.readouterr().out == "budget at 80 %\n"
