"""The documentation's table of roles agrees with the code."""

from __future__ import annotations

from pathlib import Path

from tenants.permissions import KEY, ROLES, STEP_UP, Permission

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "reference" / "tenancy.md"


def test_the_documented_table_of_roles_is_current():
    rows = {}
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 8 and cells[0].startswith("`"):
            rows[cells[0].strip("`")] = [bool(cell) for cell in cells[1:]]
    expected = {
        permission.value: [*(permission in of for of in (*ROLES.values(), KEY)), permission in STEP_UP]
        for permission in Permission
    }
    assert rows == expected
