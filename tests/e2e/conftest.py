"""Fixtures of the tests against a running platform."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.stack import Stack

MAKE_TENANT = """
import django; django.setup()
from tenants.actions import do_create_api_key, do_create_tenant
from tenants.models import Project
from tenants.isolation.scopes import tenant_scope
tenant = do_create_tenant("neighbor", "Neighbor")
with tenant_scope(tenant):
    project = Project.objects.for_tenant(tenant).get()
print(do_create_api_key(project, "theirs", scopes=("inference", "models"))[1])
"""


@pytest.fixture
def signed_in_operator(stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command line run as the platform's operator."""
    from tests.support.e2e.deployments import sign_in_operator  # loads the command line

    sign_in_operator(stack, tmp_path, monkeypatch)


@pytest.fixture(scope="session")
def neighbor(stack: Stack) -> str:
    """Return the secret of another tenant's key."""
    settings = dict(line.split("=", 1) for line in (stack.data_dir / "env").read_text().splitlines() if "=" in line)
    environ = {
        "MILLRACE_DATA_DIR": str(stack.data_dir),
        "DJANGO_SETTINGS_MODULE": "millrace.conf.settings",
        **settings,
    }
    command = [sys.executable, "-c", MAKE_TENANT]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]
