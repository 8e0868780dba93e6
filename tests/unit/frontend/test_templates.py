"""Checks of the templates: their names and the CSS classes they use."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
TEMPLATES = ROOT / "frontend/templates"
# Django and allauth find these by fixed names.
BY_NAME = re.compile(r"(account|mfa|socialaccount)/|\d{3}(_csrf)?\.html$")
IN_PYTHON = re.compile(r'"([a-z_]+(?:/[a-z_]+)+\.html)"')
CLASSES = re.compile(r'class="((?:{%.*?%}|{{.*?}}|[^"{])*)"')
TAG, VARIABLE = re.compile(r"{%.*?%}"), re.compile(r"{{.*?}}")
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


def test_every_class_is_defined() -> None:
    css = re.sub(r"/\*.*?\*/", "", (ROOT / "frontend/static/frontend/console.css").read_text(), flags=re.DOTALL)
    defined = {name for selector in re.findall(r"([^{}]+){", css) for name in re.findall(r"\.([a-z][\w-]*)", selector)}
    used = set()
    for path in TEMPLATES.rglob("*.html"):
        for value in CLASSES.findall(path.read_text()):
            names = VARIABLE.sub("*", TAG.sub(" ", value)).split()
            used |= {name for name in names if "*" not in name}
    assert used - defined == set()
