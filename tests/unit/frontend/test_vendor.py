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


def test_every_icon_of_a_template_exists():
    there = set(re.findall(r'<symbol id="([^"]+)"', (VENDOR / "icons.svg").read_text()))
    templates = Path(__file__).parents[3] / "frontend/templates"
    named = {name for path in templates.rglob("*.html") for name in re.findall(r'{% icon "([^"]+)"', path.read_text())}
    assert named
    assert named <= there
