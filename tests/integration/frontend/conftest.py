from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _strict_templates(strict_templates: None) -> None:
    pass
