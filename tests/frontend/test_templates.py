"""Templates: every one is used, and every one that is named exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "frontend/templates"
# Django and allauth find these by their own names.
BY_NAME = re.compile(r"(account|mfa|socialaccount)/|\d{3}(_csrf)?\.html$")
IN_PYTHON = re.compile(r'"([a-z_]+(?:/[a-z_]+)+\.html)"')
IN_TEMPLATE = re.compile(r'{%-?\s*(?:extends|include)\s+"([^"]+)"')


def references() -> set[str]:
    sources = [path.read_text() for path in (ROOT / "frontend").rglob("*.py")]
    sources.append((ROOT / "platform/millrace/conf/urls.py").read_text())
    named = {name for source in sources for name in IN_PYTHON.findall(source)}
    for path in TEMPLATES.rglob("*.*"):
        named |= set(IN_TEMPLATE.findall(path.read_text()))
    return named


def test_every_template_is_used_and_every_reference_exists() -> None:
    templates = {path.relative_to(TEMPLATES).as_posix() for path in TEMPLATES.rglob("*.*")}
    named = references()
    assert {name for name in named - templates if not name.startswith(("account/", "mfa/", "socialaccount/"))} == set()
    assert {name for name in templates - named if not BY_NAME.match(name)} == set()
