"""POST /v1/completions, in: OpenAI's body to the internal form."""

from __future__ import annotations

from millrace.gateway.errors import invalid
from millrace.gateway.forms import InferenceRequest
from millrace.gateway.openai.parameters import Common, check_common, read_body, sampling_params

DIALECT = "openai.completion"
DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this endpoint


class CompletionBody(Common):
    prompt: str | list[str | int]


def read_completion(body: bytes) -> InferenceRequest:
    """The internal form of a completion's body.

    Raises:
        ApiError: 400 that names the parameter.
    """
    completion = read_body(body, CompletionBody)
    check_common(completion)
    options = completion.stream_options
    return InferenceRequest(
        model=completion.model,
        prompt=_prompt(completion.prompt),
        sampling=sampling_params(completion),
        max_tokens=completion.max_tokens or DEFAULT_MAX_TOKENS,
        cache_key=completion.prompt_cache_key,
        stream=bool(completion.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
    )


def _prompt(prompt: str | list[str | int]) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and isinstance(prompt[0], str):
        return prompt[0]
    ids = [item for item in prompt if isinstance(item, int)]
    if not prompt or len(ids) != len(prompt):
        raise invalid("prompt", "prompt must be a string, a list of one string, or a list of token ids.")
    return ids
