"""Import rules that import-linter cannot express; the others are in pyproject.toml."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.imports import ROOT, imports, within

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
    "inference_worker.checkpoints",
}
BILLING_MAY = {
    "inference_worker.contract.host",
    "inference_worker.contract.journal",
    "inference_worker.contract.messages",
    "inference_worker.contract.readiness",
    "inference_worker.contract.request",
    "inference_worker.contract.script_files",
    "inference_worker.contract.texts",
    "inference_worker.contract.unsettled_usage",
    "inference_worker.contract.valkey",
}
TENANTS_MAY = BILLING_MAY | {
    "inference_worker.contract.credentials",
    "inference_worker.contract.ip_addresses",
    "inference_worker.contract.settings.MODEL_NAME",
}
GATEWAY_MAY = {
    *(
        "inference_worker.contract",
        "inference_worker.checkpoints",
        "inference_worker.engine.scheduling.ordered",
    ),
    "tenants.idempotency_rules",
    *("tenants.isolation.db_roles", "tenants.keys", "tenants.limits.token_buckets", "tenants.outbox.change_feed"),
    "tenants.outbox.totals",
    "tenants.permissions",
    *(
        f"tenants.routing_policies.{name}"
        for name in ("answer_pattern", "complexity", "experiments", "policy", "strategies")
    ),
    *(
        "billing.currencies.amounts",
        "billing.rates.pricing",
        "billing.rates.reserved_charge",
        "billing.reservations.budget_leases",
        "billing.costs.spend",
        "billing.metering.status",
    ),
}


@pytest.mark.parametrize("folder", ["kernels", "inference_worker/engine"])
def test_engine_and_kernels_run_on_a_bare_gpu_machine(folder: str) -> None:
    allowed = ENGINE_MAY | set(sys.stdlib_module_names)
    assert [found for found in imports(ROOT / folder) if not within(found[1], allowed)] == []


@pytest.mark.parametrize(
    ("folder", "of", "allowed"),
    [
        ("billing", {"inference_worker"}, BILLING_MAY),
        ("tenants", {"inference_worker"}, TENANTS_MAY),
        ("platform/millrace/gateway", {"inference_worker", "tenants", "billing"}, GATEWAY_MAY),
    ],
)
def test_the_platform_uses_only_the_public_parts_of_other_packages(
    folder: str, of: set[str], allowed: set[str]
) -> None:
    found = [(where, name) for where, name in imports(ROOT / folder) if within(name, of)]
    assert [one for one in found if not within(one[1], allowed)] == []


def test_the_oracle_of_bills_shares_only_models_with_the_product() -> None:
    """Otherwise it would have the product's errors. Models have the names of columns, and no amounts."""
    oracle = "tests/support/billing/month_oracle.py"
    of_oracle = [name for where, name in imports(ROOT / "tests/support/billing") if where.startswith(f"{oracle}:")]
    assert "billing.models.UsageEvent" in of_oracle
    allowed = {"billing.models", "tenants.models.AuditEntry", *sys.stdlib_module_names}
    assert [name for name in of_oracle if not within(name, allowed)] == []


def test_the_gateway_does_not_use_djangos_database_layer() -> None:
    banned = {"django.db", "django.contrib", "channels.db", "torch"}
    assert [found for found in imports(ROOT / "platform/millrace/gateway") if within(found[1], banned)] == []


def test_the_gateway_loads_no_torch() -> None:
    code = "import sys, millrace.gateway.routes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


def test_a_quote_needs_no_django_and_no_settings(tmp_path: Path) -> None:
    (tmp_path / "rates.csv").write_text("model,tier,component,usd_per_million\nm,,output,15\n")
    (tmp_path / "usage.json").write_text('{"model": "m", "tokens": {"output": 1}}')
    code = (
        "import sys; from millrace.cli import root; root.main(sys.argv[1:], standalone_mode=False);"
        " sys.exit('django' in sys.modules or 'psycopg' in sys.modules)"
    )
    words = ["price", "quote", "--rates", "rates.csv", "--usage", "usage.json", "--at", "2026-03-01"]
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'platform'}"}
    done = subprocess.run([sys.executable, "-c", code, *words], check=False, cwd=tmp_path, env=paths)
    assert done.returncode == 0
