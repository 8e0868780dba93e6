"""The pages of docs/reference that are generated from code are current."""

from __future__ import annotations

import pytest

from tools.generate_client import management_schema
from tools.generate_reference import REFERENCE, pages

PAGES = pages(management_schema())


@pytest.mark.parametrize("name", PAGES)
def test_the_generated_page_is_current(name: str) -> None:
    assert (REFERENCE / name).read_text(encoding="utf-8") == PAGES[name], "run `make docs-reference`"
