"""A prompt process: decodes large request bodies and tokenizes their prompts, outside the gateway's process.

    python -m millrace.gateway.prompt_processes.prompt_process

The first frame of the standard input names the models. After it, each two frames are a `PromptTask` and its body, and a
`Result` is written for each task. A task can also be to measure a model's chat template. The process ends when its
standard input is closed. It has no secrets, no connections and a low priority.
"""

from __future__ import annotations

import os
import resource
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import msgspec

from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.process_memory import return_freed_memory
from millrace.gateway.core.catalog import ServedModel, upstream_model
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest, Prompt, RequestSource
from millrace.gateway.prompt_processes.prompt_frames import (
    LENGTH,
    ModelFiles,
    PackedPrompt,
    Problem,
    PromptTask,
    Result,
)
from millrace.gateway.prompt_processes.template_measurement import is_template_cheap
from millrace.gateway.protocols.context_overflow import shorten_prompt, summary_prompt
from millrace.gateway.protocols.dialect_readers import READERS, WITHOUT_LIMIT
from millrace.gateway.protocols.last_turn import find_last_turn
from millrace.gateway.protocols.prompt_bounds import check_bounds, max_characters
from millrace.gateway.protocols.prompts import tokenize_here
from millrace.gateway.protocols.question import question_of
from millrace.gateway.protocols.upstreams.images import image_parts

NICENESS = 10
_decode_models = msgspec.msgpack.Decoder(list[ModelFiles]).decode
_decode_work = msgspec.msgpack.Decoder(PromptTask).decode
_encode = msgspec.msgpack.Encoder().encode


def main() -> None:
    os.nice(NICENESS)
    return_freed_memory()
    source, target = sys.stdin.buffer, sys.stdout.buffer
    models = _load(_decode_models(_read_frame(source) or b"\x90"))
    _write_frame(target, _encode(Result(_resident_bytes())))  # ready
    while (frame := _read_frame(source)) is not None and (body := _read_frame(source)) is not None:
        result = do_work(models, _decode_work(frame), body)
        del body
        _write_frame(target, _encode(result))


def do_work(models: Mapping[str, ServedModel], work: PromptTask, body: bytes) -> Result:
    """Read a body, tokenize its prompts and return the result or the error."""
    try:
        if work.measures_template and work.deployment is not None:
            tokenizer = models[work.deployment].tokenizer
            is_cheap, traits = is_template_cheap(tokenizer), tokenizer.probe_template()
            return Result(_resident_bytes(), is_template_cheap=is_cheap, template_traits=traits)
        request = READERS[work.reader](body)
        target = work.names.get(request.model)
        if target is None:
            return Result(_resident_bytes(), request=_without_prompts(request))
        images = _image_count(request)
        by_name = target.deployment_with_images if images and target.deployment_with_images else target.deployment
        model = models[work.deployment or by_name]
        if model.upstream is not None:
            request = request.change_analysis(source=RequestSource(work.reader, body))
        check_bounds(request, target.max_tokens, max_characters(model, target.max_tokens))
        max_tokens = None if work.reader in WITHOUT_LIMIT else target.max_tokens
        prompts = [
            PackedPrompt.pack(_tokenize_task(work, model, single, max_tokens)) for single in _single_prompts(request)
        ]
    except ApiError as exc:
        return Result(_resident_bytes(), Problem(exc.code, exc.message, exc.param))
    except Exception:  # noqa: BLE001 - an error must not end the process
        traceback.print_exc()
        return Result(
            _resident_bytes(),
            Problem("internal_error", "The server had an internal error. Send the request again.", None),
        )
    without_prompts = _without_prompts(request)
    if request.model in work.semantic_names:
        without_prompts = without_prompts.change_analysis(last_turn=find_last_turn(request))
    return Result(_resident_bytes(), None, without_prompts, model.key, tuple(prompts))


def _tokenize_task(work: PromptTask, model: ServedModel, request: InferenceRequest, max_tokens: int | None) -> Prompt:
    if work.summarizes:
        return summary_prompt(model, request, work.summarizes)
    if work.fits_tokens is not None:
        return shorten_prompt(model, request, work.fits_tokens, work.summary)
    return tokenize_here(model, request, max_tokens)


def _image_count(request: InferenceRequest) -> int:
    return len(image_parts(request.prompt)) if request.prompt_param == "messages" else 0


def _single_prompts(request: InferenceRequest) -> list[InferenceRequest]:
    return [request, *(msgspec.structs.replace(request, prompt=prompt) for prompt in request.more_prompts)]


def _without_prompts(request: InferenceRequest) -> InferenceRequest:
    """Return the request with an empty placeholder for each of its prompts."""
    prompt: list[dict[str, str]] | str = [{}] if request.prompt_param == "messages" else ""
    inputs, queries = ("",) if request.encoder.inputs else (), ("",) if request.encoder.queries else ()
    encoder = msgspec.structs.replace(request.encoder, inputs=inputs, queries=queries)
    more_prompts = ("",) * len(request.more_prompts)
    analysis = msgspec.structs.replace(
        request.analysis, source=None, images=_image_count(request), question=question_of(request)
    )
    return msgspec.structs.replace(
        request,
        prompt=prompt,
        more_prompts=more_prompts,
        encoder=encoder,
        prediction="",
        analysis=analysis,
    )


def _load(files: list[ModelFiles]) -> Mapping[str, ServedModel]:
    tokenizers: dict[tuple[str, str, str], Tokenizer] = {}
    models = {}
    for model_files in files:
        if model_files.upstream is not None:
            model = upstream_model(model_files.name, model_files.version, model_files.upstream)
            models[model.key] = model
            continue
        parsers = model_files.tool_parser, model_files.reasoning_parser
        key = model_files.directory, *parsers
        if key not in tokenizers:
            tokenizers[key] = Tokenizer.from_dir(
                Path(model_files.directory),
                tool_parser=parsers[0],
                reasoning_parser=parsers[1],
                chat_template=model_files.pair_template or "",
            )
        model = ServedModel(
            model_files.name,
            tokenizers[key],
            model_files.context_length,
            model_files.vocab_size,
            0,
            model_files.vector_sizes,
            model_files.is_cross_encoder,
            model_files.input_prompt,
            model_files.pair_template,
            version=model_files.version,
            separates_contents=model_files.separates_contents,
            truncates_inputs=model_files.truncates_inputs,
        )
        models[model.key] = model
    return models


def _read_frame(source: IO[bytes]) -> bytes | None:
    """Return the next frame, or None at the end of the input."""
    length = source.read(LENGTH.size)
    if len(length) < LENGTH.size:
        return None
    size = LENGTH.unpack(length)[0]
    frame = source.read(size)
    return frame if len(frame) == size else None


def _write_frame(target: IO[bytes], frame: bytes) -> None:
    target.write(LENGTH.pack(len(frame)))
    target.write(frame)
    target.flush()


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()
