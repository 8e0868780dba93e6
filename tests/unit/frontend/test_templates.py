"""Checks of the templates: their names and the CSS classes they use."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
TEMPLATES = ROOT / "frontend/templates"
STATIC = ROOT / "frontend/static/frontend"
STRING = re.compile(r"""["'`]([^"'`\n]*)["'`]""")
# Django and allauth find these by fixed names.
BY_NAME = re.compile(r"(account|mfa|socialaccount)/|\d{3}(_csrf)?\.html$")
IN_PYTHON = re.compile(r'"([a-z_]+(?:/[a-z_]+)+\.html(?:#\w+)?)"')
CLASSES = re.compile(r'class="((?:{%.*?%}|{{.*?}}|[^"{])*)"')
TAG, VARIABLE = re.compile(r"{%.*?%}"), re.compile(r"{{.*?}}")
IN_TEMPLATE = re.compile(r'{%-?\s*(?:extends|include)\s+"([^"]+)"')
DEFINED, SHOWN = re.compile(r"{% partialdef (\w+)(?: inline)? %}"), re.compile(r"{% partial (\w+) %}")


def references() -> set[str]:
    sources = [path.read_text() for path in (ROOT / "frontend").rglob("*.py")]
    sources += [path.read_text() for path in (ROOT / "platform/millrace/conf").rglob("*.py")]
    sources.append((ROOT / "tenants/problems.py").read_text())
    named = {name for source in sources for name in IN_PYTHON.findall(source)}
    for path in TEMPLATES.rglob("*.*"):
        text, template = path.read_text(), path.relative_to(TEMPLATES).as_posix()
        named |= {*IN_TEMPLATE.findall(text), *(f"{template}#{name}" for name in SHOWN.findall(text))}
    return named | {name.partition("#")[0] for name in named}


def test_every_template_is_used_and_every_reference_exists() -> None:
    """Also every partial of a template."""
    templates = {path.relative_to(TEMPLATES).as_posix() for path in TEMPLATES.rglob("*.*")}
    templates |= {f"{name}#{part}" for name in templates for part in DEFINED.findall((TEMPLATES / name).read_text())}
    named = references()
    assert {name for name in named - templates if not name.startswith(("account/", "mfa/", "socialaccount/"))} == set()
    assert {name for name in templates - named if not BY_NAME.match(name)} == set()


def defined_classes() -> set[str]:
    sheets = "".join(path.read_text() for path in STATIC.glob("*.css"))
    css = re.sub(r"/\*.*?\*/", "", sheets, flags=re.DOTALL)
    return {name for selector in re.findall(r"([^{}]+){", css) for name in re.findall(r"\.([a-z][\w-]*)", selector)}


def template_classes() -> set[str]:
    """The classes in templates. A variable part of a name is a star."""
    values = (value for path in TEMPLATES.rglob("*.html") for value in CLASSES.findall(path.read_text()))
    return {name for value in values for name in VARIABLE.sub("*", TAG.sub(" ", value)).split()}


def test_every_class_is_defined() -> None:
    assert {name for name in template_classes() if "*" not in name} - defined_classes() == set()


def test_every_defined_class_is_used() -> None:
    """In a template, or as a string of Python or of a script, which may be a part of it."""
    sources = [path.read_text() for area in ("frontend", "tenants", "billing") for path in (ROOT / area).rglob("*.py")]
    sources += [path.read_text() for path in STATIC.rglob("*.js")]
    strings = {word for source in sources for text in STRING.findall(source) for word in re.findall(r"[\w-]+", text)}
    in_tags = {word for path in TEMPLATES.rglob("*.html") for word in re.findall(r"[\w-]+", path.read_text())}
    patterns = [re.escape(name).replace(r"\*", ".+") for name in template_classes() if name.strip("*")]
    unused = {name for name in defined_classes() - strings if not any(re.fullmatch(one, name) for one in patterns)}
    assert unused - in_tags == set()


def test_every_tag_and_filter_is_used() -> None:
    library = (ROOT / "frontend/templatetags/console.py").read_text()
    names = re.findall(r"@register\.(filter|simple_tag)[^\n]*\ndef (\w+)", library)
    text = "".join(path.read_text() for path in TEMPLATES.rglob("*.html"))
    used = {"filter": set(re.findall(r"\|(\w+)", text)), "simple_tag": set(re.findall(r"{%-? *(\w+)", text))}
    assert names
    assert [name for kind, name in names if name not in used[kind]] == []
