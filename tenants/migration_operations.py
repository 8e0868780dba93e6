"""Operations of migrations: tables that are created together, partitioned tables, SQL from files, and stored texts.

A file of SQL defines one function, view or policy, with the triggers that call the function. `{{name}}` in it is
replaced by a value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from django.db import migrations
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState

from inference_worker.contract.script_files import read_script
from inference_worker.contract.texts import Text
from tenants.isolation.db_roles import SYSTEM
from tenants.text_field import decode_text, encode_text


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


def store_texts(
    columns: Mapping[tuple[str, str], int], sentences: Iterable[str | tuple[str, str]]
) -> migrations.RunPython:
    """Return the operation that stores texts of earlier releases as sentences with values, after the columns became
    those of `UserTextField`.

    Args:
        columns: table and column -> the greatest length of the earlier column.
        sentences: those that the earlier release stored, with placeholders, or with their plural. Other texts stay as
            they are.
    """
    pairs = [(each, "") if isinstance(each, str) else each for each in sentences]
    patterns = [(_pattern_of(form), *pair, number) for pair in pairs for number, form in enumerate(pair, 1) if form]
    patterns.sort(key=lambda row: -len(row[0].pattern))

    def read(stored: str) -> str:
        for pattern, sentence, plural, number in patterns:
            if found := pattern.fullmatch(stored):
                values: dict[str, object] = {"number": number} if plural else {}
                values |= {name: _read_value(value) for name, value in found.groupdict().items()}
                return encode_text(Text(sentence, plural, **values))
        return stored

    def forward(apps: Any, schema_editor: Any) -> None:
        for table, column in columns:
            _rewrite(schema_editor, table, column, read)

    def backward(apps: Any, schema_editor: Any) -> None:
        for (table, column), length in columns.items():
            _rewrite(schema_editor, table, column, partial(_cut_english, length))

    return migrations.RunPython(forward, backward)


def _cut_english(length: int, stored: str) -> str:
    return str(decode_text(stored))[:length]


def _pattern_of(sentence: str) -> re.Pattern[str]:
    parts = re.split(r"%\((\w+)\)s", sentence)  # every second one is a name
    literals = [re.escape(part.replace("%%", "%")) for part in parts[::2]]
    names = [f"(?P<{name}>.+?)" for name in parts[1::2]]
    return re.compile("".join(literal + name for literal, name in zip(literals, [*names, ""], strict=True)), re.DOTALL)


def _read_value(text: str) -> str | int:
    return int(text.replace(",", "")) if re.fullmatch(r"\d{1,3}(,\d{3})*", text) else text


def _rewrite(schema_editor: Any, table: str, column: str, change: Callable[[str], str]) -> None:
    """Change the texts of a column, in batches."""
    last = 0
    with schema_editor.connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL ROLE {SYSTEM}")
        while True:
            cursor.execute(
                f"SELECT id, {column} FROM {table} WHERE id > %s AND {column} <> '' ORDER BY id LIMIT 5000",  # noqa: S608
                [last],
            )
            if not (rows := cursor.fetchall()):
                break
            last = rows[-1][0]
            changed = [(changed, pk) for pk, stored in rows if (changed := change(stored)) != stored]
            cursor.executemany(f"UPDATE {table} SET {column} = %s WHERE id = %s", changed)  # noqa: S608
        cursor.execute("RESET ROLE")
