"""Bodies of POST /v1/completions, read into the internal form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from inference_worker.contract.request import Logprobs, document
from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.core.types import InferenceRequest, TemplateOptions
from millrace.gateway.protocols.documented import NotNegative
from millrace.gateway.protocols.openai.guided import read_guided
from millrace.gateway.protocols.openai.parameters import (
    Common,
    common_fields,
    find_unset_sampling,
    read_request,
    sampling_params,
)

DIALECT = "openai.completion"
MAX_PROMPTS = 64
DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this endpoint


class CompletionBody(Common, kw_only=True):
    fewest_tokens: ClassVar[int] = 0  # one token is generated, and left out of the response

    max_tokens: NotNegative | None = None
    prompt: (
        str
        | Annotated[
            list[str | NotNegative | list[NotNegative]],
            document(
                minItems=1,
                anyOf=[
                    {"items": {"type": "integer"}},
                    {"items": {"type": ["string", "array"]}, "maxItems": MAX_PROMPTS},
                ],
            ),
        ]
    )
    logprobs: Logprobs | None = None
    echo: bool | None = None


def read_completion(body: bytes) -> InferenceRequest:
    """Parse the body of a completion request.

    Raises:
        ApiError: 400 that names the parameter.
    """
    completion, ignored = read_request(body, CompletionBody)
    prompt, *more_prompts = _prompts(completion.prompt)
    echo, logprobs = bool(completion.echo), completion.logprobs
    if echo and logprobs is not None and (completion.n or 1) > 1:
        raise ApiError("unsupported_parameter", "echo with logprobs requires n to be 1.", "n")
    if echo and completion.prompt_logprobs is not None:
        raise ApiError("unsupported_parameter", "echo and prompt_logprobs cannot be combined.", "prompt_logprobs")
    params = sampling_params(completion, logprobs=logprobs, prompt_logprobs=logprobs if echo else None)
    structured = read_guided(completion, ignored)
    return InferenceRequest(
        **common_fields(completion, ignored),
        analysis=ignored.make_analysis(unset_sampling=find_unset_sampling(params, completion)),
        prompt=prompt,
        more_prompts=tuple(more_prompts),
        sampling=params,
        max_tokens=DEFAULT_MAX_TOKENS if completion.max_tokens is None else max(1, completion.max_tokens),
        structured=structured,
        echo=echo,
        echoed_parameters=_echoed_parameters(completion),
        template=TemplateOptions(
            special_tokens=completion.add_special_tokens, max_tokens=completion.truncate_prompt_tokens
        ),
    )


def _echoed_parameters(completion: CompletionBody) -> dict[str, Any]:
    """Return the parameters that determine the form of the response."""
    hidden = {"hides_output": True} if completion.max_tokens == 0 else {}
    return hidden if completion.prompt_logprobs is None else {**hidden, "prompt_logprobs": True}


def _prompts(prompt: str | list[str | int | list[int]]) -> Sequence[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    ids = [item for item in prompt if isinstance(item, int)]
    if prompt and len(ids) == len(prompt):
        return [ids]
    prompts = [item for item in prompt if not isinstance(item, int)]
    if ids or not 1 <= len(prompts) <= MAX_PROMPTS:
        raise invalid("prompt", f"prompt must be a string, token ids, or a list of 1 to {MAX_PROMPTS} of either.")
    return prompts
