"""A platform with an embedded model, an embedding model and a model that plays scripts, and its keys."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.contract.settings import ModelSpec
from tests.support.e2e.keys import make_key
from tests.support.models import models_data_dir
from tests.support.stack import EMBEDDING_MODEL, MODEL, Stack, eventually, running

ROOT = Path(__file__).parents[2]
SITE = ROOT / "tests" / "support" / "clients" / "site"
SCRIPTED_MODEL = "scripted"
CONTEXT = 2**17  # tokens; coding agents send long prompts


@pytest.fixture(scope="session")
def platform() -> Iterator[Stack]:
    folder = Path(tempfile.mkdtemp(prefix="millrace-clients-"))
    folder.chmod(0o711)
    scripted = _scripted_model(folder / SCRIPTED_MODEL)
    served = {
        MODEL: "embedded?dtype=float32",
        EMBEDDING_MODEL: "embedded:minilm",
        SCRIPTED_MODEL: f"{scripted}?reasoning_parser=think",
    }
    models = ",".join(f"{name}={source}" for name, source in served.items())
    with running(folder, MILLRACE_MODELS=models, PYTHONPATH=str(SITE)) as stack:
        _publish_prices(stack)
        yield stack
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def client_environ(platform: Stack) -> dict[str, str]:
    """Return the variables that every client program reads, except its key."""
    limited = make_key(platform, "limited", {"requests_per_day": 1})
    exhausted = platform.client().with_options(api_key=limited)
    exhausted.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=1)
    return {
        "MATRIX_URL": platform.url,
        "MATRIX_LIMITED_KEY": limited,
        "MATRIX_MODEL": MODEL,
        "MATRIX_SCRIPTED_MODEL": SCRIPTED_MODEL,
        "MATRIX_EMBEDDING_MODEL": EMBEDDING_MODEL,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # LiteLLM would download a newer list of prices
    }


def _scripted_model(directory: Path) -> Path:
    """Create a model directory like the embedded model's with a longer context. Its weights are not used."""
    shutil.copytree(ensure_model(ModelSpec(MODEL, "embedded", "float32"), models_data_dir()), directory, symlinks=True)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return directory


def _publish_prices(stack: Stack) -> None:
    """Publish prices of the scripted model. A new platform has those of the embedded models only."""
    program = (
        "from billing.pricing import demo_prices; from billing.pricing.prices import do_price_unpriced;"
        f"do_price_unpriced(demo_prices.proposal([{SCRIPTED_MODEL!r}]), 'tests')"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MILLRACE_", "DJANGO_"))}
    environ |= {"MILLRACE_DATA_DIR": str(stack.data_dir)}
    subprocess.run([sys.executable, "manage.py", "shell", "-c", program], env=environ, cwd=ROOT, check=True)
    hello = [{"role": "user", "content": "Hello"}]
    eventually(lambda: stack.client().chat.completions.create(model=SCRIPTED_MODEL, messages=hello))  # type: ignore[call-overload]
