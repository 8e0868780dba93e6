"""Generator of the golden outputs: `python -m tests.support.engine.make_golden`. It takes ten minutes on two cores."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers

from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.contract.settings import ModelSpec
from tests.support.engine.golden import GOLDEN, generate, read_prompts, write_golden


def main() -> None:
    with TemporaryDirectory() as state:
        model_dir = ensure_model(ModelSpec("smollm2-135m", "embedded", "float32"), Path(state))
        prompts = read_prompts()
        answers = []
        for answer in generate(model_dir, prompts):
            answers.append(answer)
            sys.stderr.write(f"\r{len(answers)}/{len(prompts)}")
        made_with = {"model": model_dir.name, "transformers": transformers.__version__, "torch": torch.__version__}
        write_golden(answers, made_with)
    ties = sum(len(answer.near_ties) for answer in answers)
    sys.stderr.write(f"\n{GOLDEN}: {len(answers)} answers, {ties} near ties\n")


if __name__ == "__main__":
    main()
