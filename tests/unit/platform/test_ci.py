"""The targets that CI makes."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]


def test_the_jobs_make_the_targets_of_the_run_on_one_machine() -> None:
    commands = re.findall(r"^make (.+)$", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE)
    on_one_machine = [word for command in commands for word in command.split() if not word.startswith("-")]
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    jobs = workflow["jobs"]["check"]["strategy"]["matrix"]["include"]
    in_jobs = [target for job in jobs for target in job["targets"].split()]
    assert sorted(in_jobs) == sorted([*on_one_machine, "lock-platforms"])
