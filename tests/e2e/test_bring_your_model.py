"""The tutorial "Bring your model" on its own platform, with a small Qwen3 checkpoint in random numbers."""

from __future__ import annotations

import os
import shlex
from decimal import Decimal

import pytest

from tests.support.code_blocks import ROOT, Session, blocks_of, replacements_for, run_blocks
from tests.support.engine.tiny_qwen3 import write_qwen3
from tests.support.stack import running_with

PAGE = ROOT / "docs" / "tutorials" / "bring-your-model.md"
DIRECTORY = "/models/Qwen3-0.6B"


@pytest.mark.timeout(600)
def test_a_model_is_inspected_served_priced_and_billed(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("tutorial")
    model = write_qwen3(folder / "Qwen3-0.6B", max_position_embeddings=40_960)
    blocks = blocks_of(PAGE.read_text(encoding="utf-8"))
    (started,) = [block.code for block in blocks if block.code.startswith("millrace up")]
    arguments = shlex.split(started.replace(DIRECTORY, str(model)))[2:]
    with running_with(folder, *arguments) as stack:
        (folder / ".millrace").symlink_to(stack.data_dir)
        (folder / "manage.py").symlink_to(ROOT / "manage.py")
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("MILLRACE_", "DJANGO_"))
        }
        environment |= {"MILLRACE_DATA_DIR": str(stack.data_dir), "MILLRACE_API_KEY": stack.key}
        session = Session(folder, environment, {DIRECTORY: str(model), **replacements_for(stack.url)})
        run_blocks(PAGE, session)
        (event,) = stack.events()
        assert event["model"] == "qwen3-0.6b"
        assert sum(Decimal(line["usd"]) for line in event["lines"]) > 0
