"""Screens of batches and files: an unfinished batch with a failed line, and a batch whose file was invalid."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from tests.support.frontend.console import Screen, World, register


def prepare(world: World) -> None:
    for state in ("populated", "over"):
        _fill(world, state)


def _fill(world: World, state: str) -> None:
    running, file = _create(world.tenants[state], world.projects[state], world.keys[state][0], state)
    world.rows[f"{state}.batch"] = running
    world.rows[f"{state}.file"] = file


def _create(tenant: Any, project: Any, key: Any, state: str, *, is_running: bool = True) -> tuple[str, str]:
    """Create a running or finished batch and a failed one. Return the names of the first and of its file."""
    from millrace.apps.batches.models import Batch, File, Line  # here: Django is not set up on import
    from tenants.isolation.scopes import tenant_scope

    later = datetime.now(UTC) + timedelta(days=1)
    common: dict[str, Any] = {"tenant_id": tenant.pk, "project_id": project.pk}
    with tenant_scope(tenant):
        file = File.objects.create(
            name=f"file-{state}", filename="night.jsonl", purpose="batch", size=2048, expires_at=later, **common
        )
        fields = common | {"key_id": key.pk, "dialect": "openai", "input_file": file.name, "expires_at": later}
        fields["endpoint"] = "/v1/chat/completions"
        running = Batch.objects.create(name=f"batch_{state}", status="in_progress", total=3, **fields)
        errors = [{"code": "invalid_json_line", "line": 2, "message": "This line is not valid JSON.", "param": None}]
        Batch.objects.create(name=f"batch_bad_{state}", status="failed", errors=errors, **fields)
        line: dict[str, Any] = {"batch": running, "tenant_id": tenant.pk, "byte_offset": 0, "size": 9}
        answer = b'{"error": {"message": "The model does not exist."}}'
        Line.objects.create(number=0, custom_id="a", state="answered", status=200, answer=b"{}", **line)
        Line.objects.create(number=1, custom_id="b", state="answered", status=404, answer=answer, **line)
        if is_running:
            Line.objects.create(number=2, custom_id="c", **line)
        else:
            Line.objects.create(number=2, custom_id="c", state="answered", status=200, answer=b"{}", **line)
    return running.name, file.name


def _batch(tenant: Any) -> str:
    from millrace.apps.batches.models import Batch
    from tenants.models import ApiKey

    rows = Batch.objects.for_tenant(tenant).filter(name=f"batch_{tenant.slug}")  # the platform soon runs it to its end
    if not rows.exists():
        key = ApiKey.objects.for_tenant(tenant).select_related("project").order_by("pk")[0]
        _create(tenant, key.project, key, tenant.slug, is_running=False)
    return str(rows.get().name)


register(
    Screen("batches", "/t/{slug}/batches/", queries=26),
    Screen("batches-new", "/t/{slug}/batches/new", queries=16, states=("populated", "empty")),
    Screen("batches-detail", "/t/{slug}/batches/{batch}/", queries=26, states=("populated", "error")),
    Screen("batches-cancel", "/t/{slug}/batches/{batch}/cancel", queries=14, states=("populated",)),
    Screen("batches-file-delete", "/t/{slug}/files/{file}/delete", queries=14, states=("populated",)),
    prepare=prepare,
    theirs={
        "batch": lambda world: world.rows["populated.batch"],
        "file": lambda world: world.rows["populated.file"],
    },
    demo={"batch": _batch, "file": lambda tenant: "file-none"},
)
