"""Deployments of a running platform, which the tests manage on the command line as an operator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from millrace import cli
from millrace.environment.configuration import read_env_file
from tests.support.stack import Stack

ROOT = Path(__file__).resolve().parents[3]


def sign_in_operator(stack: Stack, config_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sign in as the platform's operator. The profile is in `config_dir`."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config_dir))
    for name in ("MILLRACE_URL", "MILLRACE_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    credentials = json.loads((stack.data_dir / "credentials.json").read_text())
    answers = f"{credentials['operator_email']}\n{credentials['operator_password']}\n"
    command = ["login", "--operator", "--url", stack.url]
    signed_in = CliRunner().invoke(cli.root, command, input=answers, env={"MILLRACE_API_KEY": stack.key})
    assert signed_in.exit_code == 0, signed_in.output
    monkeypatch.delenv("MILLRACE_API_KEY", raising=False)


def run_deployments(*line: str, **environ: str) -> Any:
    """Run `millrace deployments` and return its JSON."""
    result = CliRunner().invoke(cli.root, ["deployments", *line, "--json"], env=environ)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def publish_prices(stack: Stack, *models: str) -> None:
    """Publish the demo prices of these models. A gateway uses them shortly after."""
    code = (
        "from billing.pricing import demo_prices\n"
        "from billing.pricing.prices import do_price_unpriced\n"
        f"do_price_unpriced(demo_prices.proposal({list(models)!r}), 'tests')\n"
    )
    environ = read_env_file(stack.data_dir / "env") | {"MILLRACE_DATA_DIR": str(stack.data_dir)}
    command = [sys.executable, str(ROOT / "manage.py"), "shell", "--no-imports", "-c", code]
    subprocess.run(command, env=environ, check=True, timeout=120)
