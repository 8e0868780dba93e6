"""The pages of docs/reference that are generated from code are current."""

from __future__ import annotations

import pytest

from tools.generate_reference import REFERENCE, pages
from tools.openapi.formatting import read_yaml
from tools.openapi.management import DOCUMENT

PAGES = pages(read_yaml(DOCUMENT.read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", PAGES)
def test_the_generated_page_is_current(name: str) -> None:
    assert (REFERENCE / name).read_text(encoding="utf-8") == PAGES[name], "run `make docs-reference`"
