"""Migration operations that keep `migrate` fast: Django renders all related models again after each operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db import migrations
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState


class CreateModels(Operation):
    """Several operations that create models, as one operation. The models are rendered once, after all were added."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = operations

    def deconstruct(self) -> tuple[str, Sequence[Any], dict[str, Any]]:
        return (self.__class__.__qualname__, [self.operations], {})

    def state_forwards(self, app_label: str, state: ProjectState) -> None:
        state.__dict__.pop("apps", None)  # the cached property: rendered again when it is read
        for operation in self.operations:
            operation.state_forwards(app_label, state)

    def database_forwards(
        self, app_label: str, schema_editor: Any, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        for operation in self.operations:
            operation.database_forwards(app_label, schema_editor, from_state, to_state)

    def database_backwards(
        self, app_label: str, schema_editor: Any, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        for operation in reversed(self.operations):
            operation.database_backwards(app_label, schema_editor, from_state, to_state)

    def describe(self) -> str:
        return f"Create {len(self.operations)} models"


def combine(*operations: migrations.RunSQL) -> migrations.RunSQL:
    """Return one operation that runs the statements of all these, and their reverse statements in reverse order."""
    forward = [statement for operation in operations for statement in operation.sql]
    backward = [statement for operation in reversed(operations) for statement in operation.reverse_sql or ()]
    return migrations.RunSQL(forward, backward)
