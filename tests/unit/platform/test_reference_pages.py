"""The parts of pages that are generated from code when the site is built."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from millrace.gateway.core.errors import CODES
from tenants.webhooks.event_types import EVENT_TYPES
from tools.generate_reference import PARTS, part, with_parts

DOCS = Path(__file__).parents[3] / "docs"
MARK = re.compile(r"<!-- generated: ([\w-]+) -->")
ROOT = DOCS.parent


def test_each_part_is_on_one_page() -> None:
    named = [name for page in DOCS.rglob("*.md") for name in MARK.findall(page.read_text(encoding="utf-8"))]
    assert sorted(named) == sorted(PARTS)


@pytest.mark.parametrize("page", [page for page in DOCS.rglob("*.md") if "<!-- generated" in page.read_text()])
def test_a_page_of_the_site_has_its_parts_and_no_marks(page: Path) -> None:
    built = with_parts(page.read_text(encoding="utf-8"))
    assert "generated:" not in built
    assert "The site (`make docs`) has" not in built


@pytest.mark.parametrize("page", [page for page in DOCS.rglob("*.md") if "<!-- generated" in page.read_text()])
def test_a_page_names_the_sources_of_its_parts(page: Path) -> None:
    notes = re.findall(r"^\*The site .*\*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(notes) == len(MARK.findall(page.read_text(encoding="utf-8")))
    for note in notes:
        paths = [path for path in re.findall(r"`([\w/.-]+/[\w/.-]*)`", note) if not path.startswith("/")]
        paths += [f"docs/{path}" for path in re.findall(r"\]\(\.\./([\w.-]+)\)", note)]
        assert paths, note
        assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", PARTS)
def test_no_part_is_empty(name: str) -> None:
    assert len(part(name)) > 50


def test_parts_contain_what_the_code_declares() -> None:
    assert all(f"| `{code}` |" in part("errors") for code in CODES)
    assert all(f"| `{name}` |" in part("event-types") for name in EVENT_TYPES)
    assert "| `POST /api/budgets` |" in part("operations")
    assert "| `vllm:num_requests_running` | gauge |" in part("vllm-metrics")
    assert "| `millrace_requests_total` | counter | `endpoint`, `status` |" in part("gateway-metrics")
    assert "| `millrace_kv_blocks` | gauge |" in part("replica-metrics")
    assert "| `temperature` | supported |" in part("parameters")
    assert "# millrace keys create\n" in part("commands")
    assert "| `MILLRACE_PORT` |" in part("settings")
    assert "| anthropic (Python) |" in part("clients")
