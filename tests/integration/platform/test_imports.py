"""Rules about imports that import-linter cannot say; the others are in pyproject.toml."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
OURS = {"millrace", "tenants", "billing", "frontend", "inference_worker", "kernels"}
ENGINE_MAY = {
    "torch",
    "triton",
    "numpy",
    "safetensors",
    "tokenizers",
    "jinja2",
    "llguidance",
    "kernels",
    "inference_worker.contract",
    "inference_worker.engine",
    "inference_worker.models",
}
BILLING_MAY = {"inference_worker.contract.messages", "inference_worker.contract.journal"}
GATEWAY_MAY = {
    *(
        "inference_worker.contract",
        "inference_worker.models.model_source",
        "inference_worker.engine.scheduling.ordered",
    ),
    *("tenants.isolation.db_roles", "tenants.keys", "tenants.limits.token_buckets", "tenants.outbox.change_feed"),
    *("tenants.permissions", "tenants.routing_policies.policy"),
    *("billing.amounts", "billing.pricing.pricing", "billing.budgets.budget_leases", "billing.metering.status"),
}


def imports(folder: Path) -> Iterator[tuple[str, str]]:
    """(file:line, dotted name) of every import below `folder`, wherever in the file it stands."""
    assert folder.is_dir()
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                yield from ((where, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{where}: relative import"
                # `from a import b` may name the module a.b
                yield from ((where, f"{node.module}.{alias.name}") for alias in node.names)


def within(name: str, allowed: set[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in allowed)


@pytest.mark.parametrize("folder", ["kernels", "inference_worker/engine"])
def test_engine_and_kernels_run_on_a_bare_gpu_machine(folder: str) -> None:
    allowed = ENGINE_MAY | set(sys.stdlib_module_names)
    assert [found for found in imports(ROOT / folder) if not within(found[1], allowed)] == []


@pytest.mark.parametrize(
    ("folder", "of", "allowed"),
    [
        ("billing", {"inference_worker"}, BILLING_MAY),
        ("tenants", {"inference_worker"}, BILLING_MAY),
        ("platform/millrace/gateway", {"inference_worker", "tenants", "billing"}, GATEWAY_MAY),
    ],
)
def test_the_platform_uses_only_the_open_parts_of_its_neighbors(folder: str, of: set[str], allowed: set[str]) -> None:
    found = [(where, name) for where, name in imports(ROOT / folder) if within(name, of)]
    assert [one for one in found if not within(one[1], allowed)] == []


def test_the_gateway_keeps_off_djangos_database_layer() -> None:
    banned = {"django.db", "django.contrib", "channels.db", "torch"}
    assert [found for found in imports(ROOT / "platform/millrace/gateway") if within(found[1], banned)] == []


def test_the_gateway_loads_no_torch() -> None:
    code = "import sys, millrace.gateway.routes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0
