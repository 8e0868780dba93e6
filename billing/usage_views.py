"""The views of usage. A migration that adds a token column creates them again with its columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from django.db import migrations

from inference_worker.contract.script_files import read_script

_SQL = Path(__file__).parent / "migrations" / "sql"
_NAMES = ("billing_rated_line", "billing_usagechange")
_FIRST = 7  # the columns of the first release; the others are at the end of `billing_usagechange`
# Files of the definitions of `billing_usagechange`.
FIRST_CHANGES, CHANGES = "billing_usagechange", "billing_usagechange_end_user"


def usage_views(
    tokens: Sequence[str], before: Sequence[str] = (), *, changes: str = CHANGES, changes_before: str = CHANGES
) -> migrations.RunSQL:
    """Return the operation that creates the views, or replaces those of the columns `before`.

    Args:
        tokens: the columns of usage events and adjustments with the counts of a component, in the order of `price_ids`.
        changes: the file of the definition of `billing_usagechange`.
        changes_before: the file of the definition that is replaced.
    """
    drop = tuple(f"DROP VIEW {name}" for name in _NAMES)
    if not before:
        return migrations.RunSQL(_create(tokens, changes), drop)
    return migrations.RunSQL((*drop, *_create(tokens, changes)), (*drop, *_create(before, changes_before)))


def _create(tokens: Sequence[str], changes: str) -> tuple[str, ...]:
    values = {
        "columns": ", ".join(tokens),
        "names": ", ".join(f"'{name}'" for name in tokens),
    }
    for place, names in (("", tokens[:_FIRST]), ("later_", tokens[_FIRST:])):
        values[f"{place}billed_tokens"] = ", ".join(f"e.{name} * billed AS {name}" for name in names)
        values[f"{place}adjusted_tokens"] = ", ".join(f"a.{name}" for name in names)
    return tuple(read_script(_SQL / f"{name}.sql", **values) for name in (_NAMES[0], changes))
