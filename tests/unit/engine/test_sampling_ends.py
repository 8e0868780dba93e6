"""Ends of an output, and the contents of each part of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from inference_worker.checkpoints.detokenizer import Detokenizer
from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.request import RequestOutput, SamplingParams, TokenLogprobs
from inference_worker.engine.output import append_token
from inference_worker.engine.sequences.sequence import Sequence as EngineSequence
from inference_worker.engine.sequences.step import SchedulerOutput
from tests.support.engine.fakes import EOS, FakeRunner, FakeStep, fake_engine, request, run, tokens_of
from tests.support.engine.tiny_tokenizer import write_pieces


class Letters:
    """A tokenizer whose token IDs are characters."""

    is_byte_level = True
    neutral_ids: Sequence[int] = ()

    def is_byte(self, token_id: int) -> bool:
        return False

    def token_bytes(self, token_id: int) -> bytes | None:
        return chr(token_id).encode()

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def answer(script: list[int], **params: Any) -> list[RequestOutput]:
    engine, _ = fake_engine(choose=lambda seq: script[seq.num_output_tokens])
    engine.add_request(request("x", 20, **params))
    return run(engine)["x"]


def end_of(outputs: list[RequestOutput]) -> tuple[list[int], str | None, str | int | None]:
    return tokens_of(outputs), outputs[-1].finish_reason, outputs[-1].stop_reason


def test_a_stop_token_id_ends_the_output() -> None:
    assert end_of(answer([10, 42, 12], max_tokens=3, stop_token_ids=(42,))) == ([10, 42], "stop", 42)


def test_max_tokens_ends_the_output() -> None:
    assert end_of(answer([10, 11, 12], max_tokens=2)) == ([10, 11], "length", None)


def test_before_min_tokens_neither_a_stop_token_nor_eos_ends_the_output() -> None:
    for token in (42, EOS):
        script = [10, token, token, 12]
        stop = 42 if token == 42 else None
        for least, wanted in ((0, script[:2]), (1, script[:2]), (2, script[:3])):
            outputs = answer(script, max_tokens=4, min_tokens=least, stop_token_ids=(42,))
            assert end_of(outputs) == (wanted, "stop", stop)
        assert end_of(answer(script, max_tokens=4, min_tokens=3, stop_token_ids=(42,))) == (script, "length", None)


def text_of(text: str, least: int, *stop: str, **params: Any) -> tuple[str, str | int | None]:
    """Return the output for `text`, with one token per character, and its end."""
    detokenizer = Detokenizer(Letters(), stop, include_stop=params.get("include_stop_str_in_output", False))
    seq = EngineSequence(request("x", 1, max_tokens=len(text), min_tokens=least, stop=stop, **params), detokenizer)
    found = ""
    for char in text:
        output = append_token(seq, ord(char), [ord("$")])
        found += output.text
        if output.finished:
            return found, output.stop_reason
    raise AssertionError("the answer has no end")


def test_a_stop_string_before_min_tokens_is_text() -> None:
    assert text_of("one. two. three", 0, ". ") == ("one", ". ")
    assert text_of("one. two. three", 4, ". ") == ("one", ". ")  # its last character is after them
    assert text_of("one. two. three", 5, ". ") == ("one. two", ". ")
    assert text_of("one. two. three", 15, ". ") == ("one. two. three", None)
    assert text_of("the end", 7, "end") == ("the end", None)


def test_the_text_includes_its_end_if_requested() -> None:
    assert text_of("one. two", 0, ". ", include_stop_str_in_output=True) == ("one. ", ". ")
    for is_included, wanted in ((False, "one"), (True, "one$")):
        included: dict[str, Any] = {"include_stop_str_in_output": is_included}
        assert text_of("one$ two", 0, ". ", **included) == (wanted, None)
        assert text_of("one$ two", 0, stop_token_ids=(ord("$"),), **included) == (wanted, ord("$"))


def test_special_tokens_are_text_if_requested() -> None:
    core = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    core.add_special_tokens(["<s>"])
    for decoder in (decoders.ByteLevel(), decoders.Fuse()):
        core.decoder = decoder
        tokenizer = Tokenizer(core, chat_template=None, special_tokens={}, eos_token_ids=(2,), model_max_length=9)
        for skips, wanted in ((True, "ab"), (False, "a<s>b")):
            text = tokenizer.detokenizer(SamplingParams(skip_special_tokens=skips))
            assert "".join([text.push(token) for token in (0, 2, 1)] + [text.flush()]) == wanted


def test_an_output_continues_the_text_of_its_prompt(tmp_path: Path) -> None:
    write_pieces(tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    prompt = tokenizer.encode("b a")
    for ids, wanted in ((prompt, " a a"), ([*prompt, 2], "a a")):  # 2 is a special token
        engine, _ = fake_engine(choose=lambda _: prompt[-1])
        engine.tokenizer = tokenizer
        engine.add_request(request("x", ids, max_tokens=2))
        assert "".join(output.text for output in run(engine)["x"]) == wanted


@given(st.text("ab", min_size=1, max_size=12), st.integers(0, 12), st.lists(st.text("ab", min_size=1, max_size=4)))
def test_stop_strings_count_if_they_end_after_min_tokens(text: str, least: int, stops: list[str]) -> None:
    least = min(least, len(text))
    wanted = text
    for end in range(least + 1, len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            wanted = text[: min(starts)]
            break
    assert text_of(text, least, *stops)[0] == wanted


class LogprobRunner(FakeRunner):
    """A fake runner with log-probabilities: negative positions for prompt tokens, negative IDs for output tokens."""

    def launch(self, output: SchedulerOutput) -> FakeStep:
        result = super().launch(output).read()
        samples = [s for s in output.scheduled if s.samples]
        for place, (s, [token]) in enumerate(zip(samples, result.tokens, strict=True)):
            if s.seq.params.logprobs is not None:
                result.logprobs[place] = [TokenLogprobs(token, -float(token), 1)]
        for place, s in enumerate(output.scheduled):
            if s.seq.params.prompt_logprobs is not None and not s.seq.num_output_tokens:
                last = min(s.start + s.num_new_tokens, s.seq.num_prompt_tokens - 1)
                found = [TokenLogprobs(s.seq.tokens[i], -float(i), 1) for i in range(s.start + 1, last + 1)]
                result.prompt_logprobs[place] = found
        return FakeStep(lambda: result)


def test_logprobs_are_in_the_output_of_their_request() -> None:
    engine, _ = fake_engine(40, runner=LogprobRunner(40), max_num_batched_tokens=64)
    engine.add_request(request("plain", 50, max_tokens=5))
    engine.add_request(request("asks", [7] * 100, max_tokens=5, logprobs=2, prompt_logprobs=2))
    outputs = run(engine)
    assert not any(output.logprobs or output.prompt_logprobs for output in outputs["plain"])
    assert [[entry.token_id for entry in o.logprobs] for o in outputs["asks"]] == [o.token_ids for o in outputs["asks"]]
    first, *others = outputs["asks"]
    assert first.prompt_logprobs is not None
    assert [-entry.logprob for entry in first.prompt_logprobs] == list(range(1, 100))
    assert all(output.prompt_logprobs is None for output in others)


def test_a_prompt_of_one_token_has_no_logprobs() -> None:
    engine, _ = fake_engine(runner=LogprobRunner(10))
    engine.add_request(request("x", 1, max_tokens=2, prompt_logprobs=0))
    assert [output.prompt_logprobs for output in run(engine)["x"]] == [[], None]


def test_the_first_choice_contains_the_prompts_logprobs() -> None:
    engine, _ = fake_engine(40, runner=LogprobRunner(40))
    engine.add_request(request("x", 30, max_tokens=3, prompt_logprobs=0, n=3))
    outputs = run(engine)["x"]
    brought = {output.index for output in outputs if output.prompt_logprobs is not None}
    assert brought == {0}
    assert [len(o.prompt_logprobs) for o in outputs if o.prompt_logprobs is not None] == [29]
