"""Vendored files match their manifest and have a license."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

STATIC = Path(__file__).parents[3] / "frontend/static/frontend"
VENDOR = STATIC / "vendor"
MANIFEST = json.loads((VENDOR / "manifest.json").read_text())


def test_every_file_matches_the_manifest():
    for entry in MANIFEST:
        assert hashlib.sha256((VENDOR / entry["file"]).read_bytes()).hexdigest() == entry["sha256"], entry["file"]
        assert (VENDOR / entry["license_text"]).read_text()
        assert entry["version"]


def test_every_vendored_file_has_an_entry():
    known = {entry["file"] for entry in MANIFEST} | {entry["license_text"] for entry in MANIFEST} | {"manifest.json"}
    assert {path.relative_to(VENDOR).as_posix() for path in VENDOR.rglob("*") if path.is_file()} == known


def test_every_icon_a_template_names_is_there_and_no_other_one():
    there = set(re.findall(r'<symbol id="([^"]+)"', (VENDOR / "icons.svg").read_text()))
    frontend = Path(__file__).parents[3] / "frontend"
    templates = "".join(path.read_text() for path in (frontend / "templates").rglob("*.html"))
    named = set(re.findall(r'{% icon "([^"]+)"', templates))
    assert named
    assert named <= there
    sources = templates + "".join(path.read_text() for path in frontend.rglob("*.py"))
    assert {name for name in there - named if f'"{name}"' not in sources} == set()
