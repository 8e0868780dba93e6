"""Tokenization of the inputs of encoders: texts, and pairs of texts. They are truncated to the model's length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from inference_worker.checkpoints.chat_template import ChatTemplateError, ChatTemplateWorkError
from inference_worker.checkpoints.input_encoder import EncodedInput, InputLimit, InputTooLong
from inference_worker.checkpoints.template_work import WorkBudget
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.core.types import InferenceRequest, Prompt
from millrace.gateway.protocols.prompt_bounds import max_characters, too_long

MAX_DOCUMENTS_A_SEARCH = 100
_ADVICE = "Shorten it, or set truncate to true."


def tokenize_inputs(model: ServedModel, request: InferenceRequest) -> Prompt:
    """Return the prompt of an embedding request.

    Raises:
        ApiError: 400, an input is empty, too long or not of this model.
    """
    dimensions = request.echoed_parameters.get("dimensions")
    if dimensions is not None and dimensions not in model.vector_sizes:
        sizes = " or ".join(map(str, model.vector_sizes))
        raise invalid("dimensions", f"Vectors of the model {model.name!r} have {sizes} dimensions, not {dimensions}.")
    limit, inputs = _find_limit(model, request), _Inputs(model)
    for index, item in enumerate(request.encoder.inputs):
        encoded = _encode_input(model, item, limit, index)
        if not encoded.ids:
            raise invalid("input", f"Input {index} is empty. It must have at least one token.")
        if len(encoded.ids) > model.context_length:
            longest = f"This model takes inputs of at most {model.context_length} tokens"
            message = f"{longest}, but input {index} has {len(encoded.ids)}. {_ADVICE}"
            raise ApiError("context_length_exceeded", message, "input")
        inputs.add(encoded)
    return inputs.prompt("input", is_paired=False)


def tokenize_pairs(model: ServedModel, request: InferenceRequest, budget: WorkBudget | None) -> Prompt:
    """Return the prompt of a rerank or score request, with each input together with its query.

    Args:
        budget: the work of rendering that the event loop allows; None elsewhere.

    Raises:
        ApiError: 400, a pair is empty, too long or not of this model.
        ChatTemplateWorkError: the budget is exceeded.
    """
    longest = f"This model takes pairs of at most {model.context_length} tokens"
    limit, inputs = _find_limit(model, request), _Inputs(model)
    encoder = request.encoder
    queries = encoder.queries if len(encoder.queries) > 1 else encoder.queries * len(encoder.inputs)
    for index, (query, text) in enumerate(zip(queries, encoder.inputs, strict=True)):
        name = f"{encoder.param}[{index}]"
        first, second = _shorten(model, query, limit), _shorten(model, str(text), limit)
        if (characters := max(len(first), len(second))) > max_characters(model):
            message = f"{longest}, but one has {characters} characters. {_ADVICE}"
            raise ApiError("context_length_exceeded", message, name)
        pair = _encode_pair(model, first, second, limit, request, budget, name)
        if not pair.ids:
            raise invalid(name, "The pair of texts is empty. It must have at least one token.")
        if len(pair.ids) > model.context_length:
            length = f"{name} has {len(pair.ids)} tokens together with the text it is compared with"
            raise ApiError("context_length_exceeded", f"{longest}, but {length}. {_ADVICE}", name)
        is_truncated = pair.is_truncated or len(first) < len(query) or len(second) < len(text)
        inputs.add(pair._replace(is_truncated=is_truncated))
    return inputs.prompt(encoder.param, is_paired=True, searches=count_searches(queries))


def count_searches(queries: Sequence[str]) -> int:
    """Return the searches of pairs with these queries: one for each query and up to MAX_DOCUMENTS_A_SEARCH texts."""
    return sum(-(-pairs // MAX_DOCUMENTS_A_SEARCH) for pairs in Counter(queries).values())


def check_ids(model: ServedModel, ids: list[int], param: str) -> None:
    """Check that the token ids are those of the model.

    Raises:
        ApiError: 400 that names the parameter.
    """
    if ids and not 0 <= min(ids) <= max(ids) < model.vocab_size:
        raise invalid(param, f"Token ids of this model are from 0 to {model.vocab_size - 1}.")


class _Inputs:
    """The inputs of one request that are tokenized so far."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._ids: list[int] = []
        self._lengths: list[int] = []
        self._starts: list[int] = []
        self._truncated = 0

    def add(self, encoded: EncodedInput) -> None:
        self._ids += encoded.ids
        self._lengths.append(len(encoded.ids))
        self._starts.append(encoded.second_start)
        self._truncated += encoded.is_truncated

    def prompt(self, param: str, *, is_paired: bool, searches: int = 0) -> Prompt:
        check_ids(self._model, self._ids, param)
        return Prompt(
            self._ids,
            input_lengths=tuple(self._lengths),
            second_starts=tuple(self._starts) if is_paired else (),
            searches=searches,
            truncated_inputs=self._truncated,
        )


def _find_limit(model: ServedModel, request: InferenceRequest) -> InputLimit | None:
    """Return the limit to which inputs are truncated; None: longer inputs are refused."""
    truncation = request.encoder.truncation
    is_allowed = model.truncates_inputs if truncation.is_allowed is None else truncation.is_allowed
    if not is_allowed:
        return None
    return InputLimit(min(model.context_length, truncation.max_tokens or model.context_length), truncation.keeps_end)


def _shorten(model: ServedModel, text: str, limit: InputLimit | None) -> str:
    """Return the part of a text that is tokenized to truncate it. More characters have more tokens than the model's
    length, unless a token has far more characters than the longest one of the vocabulary."""
    most = max_characters(model)
    if limit is None or len(text) <= most:
        return text
    return text[-most:] if limit.keeps_end else text[:most]


def _encode_input(model: ServedModel, item: str | list[int], limit: InputLimit | None, index: int) -> EncodedInput:
    """Return the token ids of an input."""
    if limit is None:
        if not isinstance(item, str):
            return EncodedInput(item)
        if len(item) > max_characters(model):
            raise too_long(model.context_length, f"input {index} has {len(item)} characters", "input")
        return EncodedInput(model.tokenizer.encode(model.input_prompt + item))
    try:
        if not isinstance(item, str):
            return model.tokenizer.inputs.truncate_ids(item, limit)
        text = _shorten(model, item, limit)
        encoded = model.tokenizer.inputs.encode_text(model.input_prompt + text, limit)
        return encoded._replace(is_truncated=encoded.is_truncated or len(text) < len(item))
    except InputTooLong as exc:
        raise _no_room(limit, exc) from None


def _encode_pair(
    model: ServedModel,
    query: str,
    text: str,
    limit: InputLimit | None,
    request: InferenceRequest,
    budget: WorkBudget | None,
    param: str,
) -> EncodedInput:
    """Return the token ids of a pair."""
    tokenizer, most = model.tokenizer, request.encoder.max_tokens
    try:
        if model.pair_template is None:
            return tokenizer.inputs.encode_pair(query, text, limit, most)
        return tokenizer.encode_rendered_pair(
            model.input_prompt, query, text, limit, most, budget, separates=model.separates_contents
        )
    except InputTooLong as exc:
        raise _no_room(limit, exc) from None
    except ChatTemplateError as exc:
        if isinstance(exc, ChatTemplateWorkError) and budget is not None:
            raise  # a prompt process may have a larger budget
        raise invalid(param, str(exc)) from None


def _no_room(limit: InputLimit | None, reason: InputTooLong) -> ApiError:
    """Return the error of a limit that leaves no room for a text."""
    tokens = 0 if limit is None else limit.max_tokens
    return invalid("truncate_prompt_tokens", f"Inputs cannot be truncated to {tokens} tokens: {reason}.")
