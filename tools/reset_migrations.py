"""Write `0001_schema` of each app from its models, and delete the other migrations except `0002_sql`.

    python -m tools.reset_migrations

docs/guides/development.md describes the whole reset of the migrations.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from django.db.migrations import Migration

# In the order of their dependencies. App -> what its tables contain.
APPS = {
    "tenants": "tenants, users, keys, limits, policies, the audit log, the change feed, webhooks, emails and jobs",
    "billing": "usage, prices, budgets, costs, invoices, payments and the ledger",
    "batches": "files, batches and their lines",
    "feedback": "feedback on requests",
    "request_log": "requests, their contents, sums and comparisons, and the semantic cache",
    "experiments": "the results of experiments",
    "operations": "deployments, cordons, machine costs, samples of replicas and health events",
    "alerts": "alert rules and their alerts",
}
PARTITION_COLUMNS = {"UsageEvent": "admitted_at", "RequestRecord": "started_at"}
KEPT = {"__init__.py", "0002_sql.py"}


def create_migration(label: str, leaves: dict[str, str]) -> Migration:
    """Return the migration that creates the tables of an app. `leaves`: the last migration of each other app."""
    from django.apps import apps
    from django.db.migrations import CreateModel, Migration
    from django.db.migrations.state import ModelState

    from tenants.migration_operations import CreateModels, CreatePartitionedModel

    operations, related = [], set()
    for model in apps.get_app_config(label).get_models():
        fields = (*model._meta.local_fields, *model._meta.local_many_to_many)
        related |= {field.remote_field.model._meta.app_label for field in fields if field.remote_field}
        state = ModelState.from_model(model)
        options = {name: value for name, value in state.options.items() if value or name == "managed"}
        arguments = (state.name, list(state.fields.items()), options, state.bases, state.managers)
        operations.append(
            CreatePartitionedModel(*arguments, partition_column=PARTITION_COLUMNS[state.name])
            if state.name in PARTITION_COLUMNS
            else CreateModel(*arguments)
        )
    parts = {
        "initial": True,
        "dependencies": [(app, leaves[app]) for app in sorted(related - {label})],
        "operations": [CreateModels(operations)],
    }
    migration: Migration = type("Migration", (Migration,), parts)("0001_schema", label)
    return migration


def main() -> None:
    """Write the migrations."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.support.typing_settings")
    import django

    django.setup()
    from django.apps import apps
    from django.conf import settings
    from django.db.migrations.loader import MigrationLoader
    from django.db.migrations.writer import MigrationWriter

    settings.MIGRATION_MODULES = dict.fromkeys(APPS)  # as if these had no migrations
    leaves = dict(MigrationLoader(None).graph.leaf_nodes())
    for label, tables in APPS.items():
        migration = create_migration(label, leaves)
        leaves[label] = migration.name
        directory = Path(apps.get_app_config(label).path) / "migrations"
        for path in directory.glob("*.py"):
            if path.name not in KEPT:
                path.unlink()
        docstring = f'"""Create the tables of {tables}.\n\nWritten by tools/reset_migrations.py.\n"""\n\n'
        text = MigrationWriter(migration, include_header=False).as_string()
        (directory / f"{migration.name}.py").write_text(docstring + text.lstrip(), encoding="utf-8")


if __name__ == "__main__":
    main()
