"""An engine that plays scripts, for clients that need answers which a small model does not give.

Scheduler, KV cache, structured output, tokenizer and detokenizer are those of `LLMEngine`; only the model is replaced.
A prompt selects a script of tests/clients/scripts.json by `[[name]]`. The script has one answer for each turn of the
assistant after that mark. Two names have no script: `[[long]]` is answered by many words, and `[[overloaded]]` by an
error.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from pathlib import Path

from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.engine_config import EngineConfig
from inference_worker.contract.request import Request, RequestRejected
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.sequences.sequence import Sequence
from tests.support.engine.fakes import FakeRunner

SCRIPTS = Path(__file__).parents[2] / "clients" / "scripts.json"
NUM_BLOCKS = 2**15
TOKEN_SECONDS = 0.002
_MARK = re.compile(r"\[\[(\w+)\]\]")
_TURN = "<|im_start|>assistant"  # in the chat template of the served model


class ScriptedEngine(LLMEngine):
    """An `LLMEngine` whose tokens are those of the scripts."""

    def __init__(self, config: EngineConfig) -> None:
        tokenizer = Tokenizer.from_dir(config.model_dir)
        super().__init__(
            dataclasses.replace(
                config, max_num_batched_tokens=2**16, long_prefill_token_threshold=2**16, speculation=False
            ),
            runner=FakeRunner(NUM_BLOCKS, self._choose),
            tokenizer=tokenizer,
        )
        self._tokenizer = tokenizer
        self._scripts: dict[str, list[str]] = json.loads(SCRIPTS.read_text())
        self._answers: dict[str, list[int]] = {}

    def add_request(self, request: Request) -> None:
        self._answers = {name: tokens for name, tokens in self._answers.items() if name in self._groups}
        prompt = self._tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        answer = self._answer(prompt)
        self._answers[request.request_id] = self._tokenizer.encode(answer, add_special_tokens=False)
        super().add_request(request)

    def _answer(self, prompt: str) -> str:
        marks = list(_MARK.finditer(prompt))
        name = marks[-1].group(1) if marks else ""
        if name == "overloaded":
            raise RequestRejected("server_is_overloaded", "The script says that the server is overloaded. Retry later.")
        if name == "long":
            return "word " * 4000
        if name not in self._scripts:
            return "The prompt names no script."
        script = self._scripts[name]
        turn = prompt.count(_TURN, marks[-1].end()) - 1
        return script[min(turn, len(script) - 1)]

    def _choose(self, seq: Sequence) -> int:
        time.sleep(TOKEN_SECONDS)
        answer = self._answers[seq.request_id]
        return answer[seq.num_output_tokens] if seq.num_output_tokens < len(answer) else min(self._eos)
