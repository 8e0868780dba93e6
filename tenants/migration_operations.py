"""Operations of migrations: tables that are created together, partitioned tables, and SQL from files.

A file of SQL defines one function, view or policy, with the triggers that call the function. `{{name}}` in it is
replaced by a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from django.db import migrations
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState

from inference_worker.contract.script_files import read_script


class CreateModels(Operation):
    """Several operations that create models, as one operation. The models are rendered once, after all were added.

    Django renders all related models again after each operation, which takes most of the time of a migration.
    """

    serialization_expand_args: ClassVar = ["operations"]

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


class CreatePartitionedModel(migrations.CreateModel):
    """The creation of a table that is partitioned by ranges of a column, which Django cannot create."""

    def __init__(
        self,
        name: str,
        fields: list[tuple[str, Any]],
        options: dict[str, Any] | None = None,
        bases: Sequence[Any] | None = None,
        managers: Sequence[Any] | None = None,
        *,
        partition_column: str,
    ) -> None:
        self.partition_column = partition_column
        super().__init__(name, fields, options, bases, managers)

    def deconstruct(self) -> tuple[str, Sequence[Any], dict[str, Any]]:
        name, arguments, options = super().deconstruct()
        return name, arguments, {**options, "partition_column": self.partition_column}

    def database_forwards(
        self, app_label: str, schema_editor: Any, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        create_table = schema_editor.sql_create_table
        schema_editor.sql_create_table = f"{create_table} PARTITION BY RANGE ({self.partition_column})"
        try:
            super().database_forwards(app_label, schema_editor, from_state, to_state)
        finally:
            schema_editor.sql_create_table = create_table


class SqlFiles:
    """The SQL files of an app's migrations, in the directory `sql` beside them."""

    def __init__(self, migration: str, **values: str) -> None:
        """Take the migration's `__file__`, and the values of `{{name}}` in all files."""
        self._directory = Path(migration).parent / "sql"
        self._values = values

    def functions(self, *names: str) -> migrations.RunSQL:
        """Return the operation that creates these functions, with their triggers."""
        drop = tuple(f"DROP FUNCTION {name} CASCADE" for name in reversed(names))
        return migrations.RunSQL([self.read(name) for name in names], drop)

    def read(self, name: str, **values: str) -> str:
        """Return the SQL of a file."""
        return read_script(self._directory / f"{name}.sql", **self._values, **values)


def combine(*operations: migrations.RunSQL) -> migrations.RunSQL:
    """Return one operation that runs the statements of all these, and their reverse statements in reverse order."""
    forward = [statement for operation in operations for statement in operation.sql]
    backward = [statement for operation in reversed(operations) for statement in operation.reverse_sql or ()]
    return migrations.RunSQL(forward, backward)
