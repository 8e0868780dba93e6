"""Other servers' names of parameters that limit or constrain an answer. They are never dropped like unknown fields.

A name is compared without case, `_` and `-`, so `maxNewTokens` is `max_new_tokens`. The same table applies to all
endpoints, and to the fields of unknown objects such as `options`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from inference_worker.contract.request import SAMPLING_PARAMETERS
from millrace.gateway.core.errors import ApiError

MAX_DEPTH = 4  # objects within unknown objects that are examined
MAX_FIELDS = 512  # fields of unknown objects that are examined, in one body
_SEPARATORS = re.compile(r"[_-]")


@dataclass(frozen=True)
class LimitKind:
    """A limit or constraint of an answer, with the parameters that have it here, the most suitable first."""

    effect: str
    parameters: tuple[str, ...]
    refuse_always: bool = False  # also for upstreams, since the reserved output depends on it


_LENGTH = LimitKind(
    "limits the answer's length", ("max_completion_tokens", "max_output_tokens", "max_tokens"), refuse_always=True
)
_COUNT = LimitKind("sets the number of answers", ("n",), refuse_always=True)
_MINIMUM = LimitKind("sets a minimum length", ("min_tokens",))
_STOP = LimitKind("ends the answer", ("stop", "stop_sequences"))
_BAN = LimitKind("excludes or requires tokens", ("logit_bias",))
_FORMAT = LimitKind(
    "constrains the answer's format", ("response_format", "text.format", "output_config.format", "structured_outputs")
)
_VECTOR_LENGTH = LimitKind("sets the length of the vectors", ("dimensions",))
_VECTOR_FORMAT = LimitKind("sets the format of the vectors", ("encoding_format",))
_RESULTS = LimitKind("limits the number of results", ("top_n",))
_SAMPLING = LimitKind("changes how tokens are chosen", SAMPLING_PARAMETERS)

_NAMES: Mapping[LimitKind, str] = {
    _LENGTH: """max_tokens max_completion_tokens max_output_tokens max_new_tokens max_generated_tokens max_gen_tokens
        max_generation_tokens max_tokens_to_sample max_tokens_to_generate max_tokens_to_predict max_predict_tokens
        max_predicted_tokens max_response_tokens max_response_output_tokens max_response_length max_answer_tokens
        max_token_count max_token max_gen_len max_new_length max_output_length max_output_len max_decode_steps
        max_decode_tokens max_length maximum_tokens maximum_output_tokens maximum_length n_predict num_predict
        tokens_to_generate output_len request_output_len output_token_limit max_time time_limit
        t_max_predict_ms""",
    _COUNT: """n best_of candidate_count num_return_sequences num_completions num_generations num_answers num_choices
        num_samples num_beams""",
    _MINIMUM: """min_tokens min_new_tokens min_length min_completion_tokens min_output_tokens min_predict n_min
        min_tokens_to_generate""",
    _STOP: """stop_sequences stop_strings stop_words stop_texts stop_token_ids stop_tokens stop_regex stop_conditions
        stopping_strings custom_stopping_strings stop_str end_sequences eos_token_id antiprompt terminators""",
    _BAN: """bad_words bad_words_ids banned_tokens banned_strings banned_words suppress_tokens allowed_token_ids
        force_words_ids logits_processors custom_logit_processor""",
    _FORMAT: """response_format output_format text_format grammar grammar_string ebnf gbnf json_schema response_schema
        response_json_schema output_schema response_mime_type guided_json guided_json_object guided_regex guided_choice
        guided_grammar guided_decoding guided_whitespace_pattern structured_output structured_outputs structural_tag
        regex_constraint regex_pattern json_mode""",
    _VECTOR_LENGTH: "dimension dimensions output_dimension output_dimensionality embedding_dimension embedding_size",
    _VECTOR_FORMAT: "output_dtype embedding_type embedding_types",
    _RESULTS: "top_n num_results max_results",
}
# Names that have other meanings elsewhere. They count at the top level of a body and in the objects `_CONTAINERS`.
_SHORT_NAMES: Mapping[LimitKind, str] = {
    _STOP: "stop stops until",
    _FORMAT: "format regex schema choice",
}
# Objects in which other servers or clients expect the parameters of an answer.
_CONTAINERS = """options parameters params generation_config generate_config generation_parameters generation_kwargs
    gen_kwargs generate_kwargs model_kwargs model_parameters model_params model_config llm_config llm_kwargs
    sampling_params sampling_parameters sampling_config sampling inference_config inference_parameters
    text_generation_config extra_body extra_params extra config settings kwargs nvext request_parameters output_config
    text decoding completion_options completion_params additional_model_request_fields overrides"""
# Parameters of reasoning, which a model without reasoning ignores.
_REASONING = frozenset({"reasoning", "thinking", "thinkingconfig"})
_NEUTRAL: tuple[Any, ...] = ("", "text", "text/plain", {}, [], {"type": "text"}, False)  # values that constrain nothing


def _normalize(name: str) -> str:
    return _SEPARATORS.sub("", name[:80]).lower()


def _index_kinds(names: Mapping[LimitKind, str]) -> dict[str, LimitKind]:
    return {_normalize(name): kind for kind, text in names.items() for name in text.split()}


_KINDS = _index_kinds(_NAMES)
_SHORT_KINDS = _KINDS | _index_kinds(_SHORT_NAMES)
_CONTAINER_KINDS = {_normalize(name): _SAMPLING for name in SAMPLING_PARAMETERS} | _SHORT_KINDS
_CONTAINER_NAMES = frozenset(map(_normalize, _CONTAINERS.split()))


class ForeignLimits:
    """The limits in the unknown fields of one body, by path."""

    def __init__(self) -> None:
        self._found: dict[str, LimitKind] = {}
        self._fields = 0  # fields that were examined

    def examine(self, name: str, value: Any) -> bool:
        """Find limits in an unknown top-level field. Return whether the field is or contains one."""
        before = len(self._found)
        self._examine(name, name, value, _SHORT_KINDS, 0)
        return len(self._found) > before

    def examine_nested(self, path: str, value: Any) -> None:
        """Find limits in an unknown field of a known object."""
        if _normalize(path.partition(".")[0]) not in _REASONING:
            self._examine(path, path.rpartition(".")[2], value, _KINDS, 1)

    def _examine(self, path: str, name: str, value: Any, kinds: Mapping[str, LimitKind], depth: int) -> None:
        self._fields += 1
        normalized = _normalize(name)
        if (kind := kinds.get(normalized)) is not None:
            if not _is_neutral(kind, value):
                self._found[path] = kind
        elif isinstance(value, dict) and depth < MAX_DEPTH and normalized not in _REASONING:
            inner = _CONTAINER_KINDS if normalized in _CONTAINER_NAMES else _KINDS
            for key, item in value.items():
                if self._fields >= MAX_FIELDS:
                    return
                if item is not None:
                    self._examine(f"{path}.{key}", str(key), item, inner, depth + 1)

    def unmet(self, supported: Collection[str]) -> tuple[tuple[str, str], ...]:
        """Return the limits that only an upstream may take, as pairs of a path and the message of their refusal.

        Args:
            supported: the parameters of the endpoint. An endpoint that generates no text has no limits of answers.

        Raises:
            ApiError: 400, there is a limit that is always refused.
        """
        unmet = []
        for path, kind in self._found.items():
            parameter = _parameter(kind, path, supported)
            if parameter is None and not _generates(supported):
                continue
            message = f"The parameter {path[:100]!r} {kind.effect} at other servers and has no effect here."
            message += " Omit it." if parameter is None else f" Use {parameter!r}."
            if kind.refuse_always:
                raise ApiError("unsupported_parameter", message, path[:100])
            unmet.append((path[:100], message))
        return tuple(unmet)


def equivalent(name: str, supported: Collection[str]) -> str | None:
    """Return the endpoint's parameter with the same effect as another dialect's one, if there is one."""
    kind = _SHORT_KINDS.get(_normalize(name))
    return None if kind is None else _parameter(kind, name, supported)


def _parameter(kind: LimitKind, path: str, supported: Collection[str]) -> str | None:
    own = [name for name in kind.parameters if name.partition(".")[0] in supported]
    if kind is _SAMPLING:
        name = _normalize(path.rpartition(".")[2])
        own = [each for each in own if _normalize(each) == name]
    return own[0] if own else None


def _generates(supported: Collection[str]) -> bool:
    return "temperature" in supported


def _is_neutral(kind: LimitKind, value: Any) -> bool:
    """Return whether the value limits nothing: `num_predict` -1 is no limit, and one answer is the default."""
    if kind is _COUNT:
        return type(value) is int and value == 1
    if type(value) in (int, float):
        return bool(value < 0) or (kind is _MINIMUM and value == 0)
    return any(type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL)
