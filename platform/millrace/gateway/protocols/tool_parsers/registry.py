"""The parser of each tool-call format."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType

from inference_worker.contract.output_formats import TOOL_FORMATS
from millrace.gateway.core.types import ResponseSpec
from millrace.gateway.protocols.tool_parsers.base import PlainTextParser, ToolCallParser, UpstreamCallParser
from millrace.gateway.protocols.tool_parsers.gemma import GemmaParser
from millrace.gateway.protocols.tool_parsers.granite import GraniteParser
from millrace.gateway.protocols.tool_parsers.hermes import HermesParser
from millrace.gateway.protocols.tool_parsers.llama3_json import Llama3JsonParser
from millrace.gateway.protocols.tool_parsers.mistral import MistralParser
from millrace.gateway.protocols.tool_parsers.pythonic import PythonicParser
from millrace.gateway.protocols.tool_parsers.tags import TagsParser
from millrace.gateway.protocols.tools import UPSTREAM_CALLS

TOOL_PARSERS: Mapping[str, Callable[[Collection[str]], ToolCallParser]] = {
    "hermes": HermesParser,
    "qwen3": HermesParser,
    "llama3_json": Llama3JsonParser,
    "pythonic": PythonicParser,
    "mistral": MistralParser,
    "mistral_args": MistralParser,
    "granite": GraniteParser,
    "gemma": GemmaParser,
    "qwen3_coder": partial(TagsParser, TOOL_FORMATS["qwen3_coder"]),
    "glm4": partial(TagsParser, TOOL_FORMATS["glm4"]),
}
assert TOOL_PARSERS.keys() == TOOL_FORMATS.keys()  # noqa: S101  (a format without a parser could be configured)


def parser_of(spec: ResponseSpec) -> ToolCallParser | PlainTextParser:
    """Return a parser for one completion of a response."""
    return make_parser(
        spec.tool_format, spec.tools, spec.max_calls, spec.parameter_types, expects_json=spec.expects_json
    )


def make_parser(
    tool_format: str,
    names: Collection[str],
    max_calls: int = 0,
    parameter_types: Mapping[str, Mapping[str, Collection[str]]] = MappingProxyType({}),
    *,
    expects_json: bool = False,
) -> ToolCallParser | PlainTextParser:
    """Return a parser for a completion in which these tools may be called.

    Args:
        max_calls: number of calls after which further ones are dropped; 0: no limit.
        parameter_types: JSON types of each tool's parameters; other parameters may have any type.
        expects_json: the request asks for a text in JSON, so that JSON without marks is no call.
    """
    if not names:
        return PlainTextParser()
    if tool_format == UPSTREAM_CALLS:
        return UpstreamCallParser(max_calls)
    parser = TOOL_PARSERS[tool_format](names)
    parser.max_calls, parser.parameter_types, parser.expects_json = max_calls, parameter_types, expects_json
    return parser
