"""The internal form of requests and responses. Each API dialect is translated to and from these types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from inference_worker.contract.messages import AnswerEvent
from inference_worker.contract.request import (
    CacheBreakpoint,
    ReasoningSpec,
    SamplingParams,
    ServiceClass,
    StructuredSpec,
    TokenCounts,
)
from inference_worker.contract.upstreams import UpstreamRequest

if TYPE_CHECKING:
    from millrace.gateway.core.catalog import ServedModel


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)  # a JSON schema; empty allows any object
    strict: bool = False
    enforced: dict[str, Any] | None = None  # the part of `parameters` that is enforced; None: all


class CheckedSchemas(msgspec.Struct, frozen=True):
    """JSON schemas that are enforced in part, under which the finished answer is validated. Empty: too large for it."""

    answer: str | None = None  # schema of the text; None: it is enforced completely
    tools: dict[str, str] = {}  # schemas of the arguments, by the names of the tools


MODEL_LENGTH = -1  # in `truncate_prompt_tokens`: as many tokens as the model has room for


@dataclass(frozen=True)
class TemplateOptions:
    """How the chat template renders a conversation."""

    continues: bool = False  # the completion continues the last message, which is the assistant's
    adds_prompt: bool = True  # the prompt ends with the beginning of the assistant's message
    variables: dict[str, Any] = field(default_factory=dict)  # further variables of the template
    special_tokens: bool | None = None  # whether the tokenizer adds them; None: to texts, not to conversations
    max_tokens: int | None = None  # only the last tokens of the prompt are used, at most this many or MODEL_LENGTH


@dataclass(frozen=True)
class ReasoningOptions:
    """The reasoning that a request asks for. Models without reasoning ignore it."""

    is_enabled: bool | None = None  # None: the template's default
    budget: int | None = None  # maximum tokens of the reasoning; None: no limit
    names: tuple[str, ...] = ()  # names of the parameters, which are reported as ignored if the model has no reasoning
    effort: str | None = None  # in OpenAI's words, if the request names one


@dataclass(frozen=True)
class InputTruncation:
    """How inputs of encoders are truncated."""

    is_allowed: bool | None = None  # whether inputs above the limit are truncated or refused; None: the deployment's
    max_tokens: int | None = None  # the limit; None: the model's length
    keeps_end: bool = False  # the beginning of an input is dropped instead of its end


class EncoderInputs(msgspec.Struct, frozen=True):
    """The inputs of a request to an encoder."""

    inputs: tuple[str | list[int], ...] = ()  # texts or token IDs; empty: the request has a prompt
    queries: tuple[str, ...] = ()  # cross-encoders: the text that each input is paired with, or one for all inputs
    max_tokens: int | None = None  # cross-encoders: an input is truncated to this many tokens
    truncation: InputTruncation = InputTruncation()
    param: str = "input"  # the dialect's parameter name for the inputs


@dataclass(frozen=True)
class Breakpoint:
    """A position in the prompt. The prefix before it stays cached for `seconds` after its last use.

    If `tools` is set, the position is after that many tools. Otherwise it is after all tools and the first `messages`
    messages. If `characters` is set, only that many characters of the last message's content are before it.
    """

    seconds: int  # 300 or 3600
    tools: int | None = None
    messages: int = 0
    characters: int | None = None


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt."""

    ids: list[int]
    breakpoints: tuple[CacheBreakpoint, ...] = ()
    input_lengths: tuple[int, ...] = ()  # encoders: the number of tokens of each input, in the order of `ids`
    second_starts: tuple[int, ...] = ()  # cross-encoders: the position of the second text in each input
    reasoning: ReasoningSpec | None = None  # the reasoning that may precede the answer
    prediction: tuple[int, ...] = ()  # the tokens of the expected output
    upstream: UpstreamRequest | None = None  # instead of tokens, for a model that an upstream runs
    ignored: tuple[str, ...] | None = None  # the request's fields without effect at the upstream; None: the request's
    dropped_messages: int = 0  # messages in the middle of the conversation that were left out, so that it fits
    searches: int = 0  # cross-encoders: the searches that the request is billed for
    truncated_inputs: int = 0  # encoders: inputs of which only a part was read

    @property
    def num_tokens(self) -> int:
        """The number of tokens; for an upstream, an upper bound."""
        return len(self.ids) if self.upstream is None else self.upstream.prompt_tokens

    @property
    def expected_tokens(self) -> int:
        """The number of tokens; for an upstream, an estimate."""
        return len(self.ids) if self.upstream is None else self.upstream.estimated_tokens

    @property
    def truncated(self) -> str:
        """The number of truncated inputs of all inputs, such as "3 of 40"; empty: none was truncated."""
        return f"{self.truncated_inputs} of {len(self.input_lengths)}" if self.truncated_inputs else ""


class LastTurn(NamedTuple):
    """The last turn of the user in a conversation, and the digest of everything else that the answer depends on."""

    text: str
    context: bytes


class RequestSource(NamedTuple):
    """The body that a request was read from."""

    reader: str  # key of `dialect_readers.READERS`
    body: bytes


class TokenizedPrompts(Protocol):
    """The prompts of a request that a prompt process decodes and tokenizes."""

    async def prompt(self, model: ServedModel, number: int) -> Prompt:
        """Return the prompt with this number, in the tokens of the model.

        Raises:
            ApiError: 400, the prompt is invalid for this model; 503, it cannot be tokenized now.
        """

    async def shorten(self, model: ServedModel, number: int, max_tokens: int, summary: str = "") -> Prompt:
        """Return the prompt without messages in its middle, so that it has at most `max_tokens` tokens.

        Args:
            summary: of the dropped messages.

        Raises:
            ApiError: 400, it cannot be shortened enough; 503, it cannot be tokenized now.
        """

    async def summary_prompt(self, model: ServedModel, number: int, dropped: int) -> Prompt:
        """Return the prompt that requests the summary of dropped messages.

        Raises:
            ApiError: 400, the model cannot summarize; 503, it cannot be tokenized now.
        """


MAX_END_USER_LENGTH = 128


class RequestAnalysis(msgspec.Struct, frozen=True):
    """The analysis of a request: what the gateway found in its body, and the means to tokenize its prompt."""

    # Results of the check of the body's fields.
    ignored: tuple[str, ...] = ()  # fields that were accepted without effect, for the response header and the record
    unknown: tuple[str, ...] = ()  # those of them that are unknown, and rejected if `unknown_parameters` is reject
    loosened: tuple[str, ...] = ()  # those of them that are keywords of JSON schemas
    checked: CheckedSchemas | None = None  # the schemas from which keywords were removed; None: there are none
    # Unknown fields that limit answers at other servers, with the messages of their refusal. Upstreams may take some.
    foreign_limits: tuple[tuple[str, str], ...] = ()
    unset_sampling: tuple[str, ...] = ()  # sampling parameters that take the deployment's defaults
    # Contents of the prompt.
    parts: int = 0  # content parts of all messages
    images: int = 0  # images in all messages, if a prompt process has read the request
    question: str = ""  # the start of the last user message, if a prompt process has read the request
    last_turn: LastTurn | None = None  # set if a prompt process has read the request, for the semantic cache
    number: int = 0  # place of this prompt among the request's prompts
    # Means to tokenize the prompt.
    source: RequestSource | None = None  # set if an upstream may run the request
    # Set if a prompt process has read the request. Then its prompts and the encoder's inputs are placeholders.
    tokenized: TokenizedPrompts | None = None
    # Set otherwise: reads the body in a prompt process if the chat template must not be rendered on the event loop.
    in_process: TokenizedPrompts | None = None

    @property
    def is_charged(self) -> bool:
        """Return whether the request was charged to the tenant's request limits before it was read."""
        return self.tokenized is not None and self.number == 0

    def defaults_of(self, model: ServedModel) -> dict[str, Any]:
        """Return the sampling parameters that the request takes from the deployment."""
        return {name: value for name, value in model.sampling_defaults if name in self.unset_sampling}


class InferenceRequest(msgspec.Struct, frozen=True):
    """A client's request, independent of the API dialect: the parameters that the client set, and their analysis."""

    model: str  # name that the client requested: a deployment or a routing policy
    # Chat messages, text or token IDs. A message has `role` and `content` (a string). An assistant message may have
    # `tool_calls` ({"id", "type": "function", "function": {"name", "arguments": dict}}), a tool message `tool_call_id`.
    # A message with images also has `parts`: {"type": "text", "text"} and {"type": "image", "url", "detail", "path"}.
    prompt: list[Any] | str
    sampling: SamplingParams  # its max_tokens is not used: admission sets the limit
    max_tokens: int | None = None  # None: the request does not set a limit
    analysis: RequestAnalysis = RequestAnalysis()  # what the gateway found in the body
    template: TemplateOptions = msgspec.field(default_factory=TemplateOptions)  # how the prompt is rendered
    reasoning: ReasoningOptions = ReasoningOptions()  # switch, limit and effort of the reasoning
    tools: tuple[Tool, ...] = ()  # functions that the model may call
    tool_choice: str = "auto"  # or "none", "required", or the name of the tool to call
    allowed_tools: tuple[str, ...] | None = None  # the tools that may be called; None: all
    parallel_tools: bool = True  # an answer may have several calls
    structured: StructuredSpec | None = None  # structured output, apart from that of the tool calls
    breakpoints: tuple[Breakpoint, ...] = ()  # cache breakpoints, in the order of the prompt
    service_class: ServiceClass = ServiceClass.DEFAULT  # the client's service tier, or the class of batches
    priority: int = 0  # within the tenant and the service class; lower runs first
    speculates: bool = True  # whether drafts of the output may be verified
    prediction: str = ""  # the expected output, a source of drafts
    cache_key: str | None = None  # separates prefix caches within the tenant
    cache_directives: frozenset[str] = frozenset()  # directives of the header x-millrace-cache
    metadata: dict[str, str] = {}  # set by the client, stored with the decision record
    user: str | None = None  # the client's end user, also stored
    # Label of the header x-millrace-task, or of the metadata. Rules of routing policies may depend on it.
    task: str = ""
    stream: bool = False  # the response is sent as server-sent events
    include_usage: bool = False  # a stream ends with an event with the usage
    continuous_usage: bool = False  # each event of a stream has the usage so far
    echo: bool = False  # the completion begins with the prompt
    more_prompts: tuple[str | list[int], ...] = ()  # their completions are further choices of the response
    encoder: EncoderInputs = EncoderInputs()  # instead of a prompt
    echoed_parameters: dict[str, Any] = {}  # parameters that the dialect's response repeats

    @property
    def end_user(self) -> str:
        """Return the start of `user`, as it is stored."""
        return (self.user or "")[:MAX_END_USER_LENGTH].replace("\0", "")

    @property
    def hides_output(self) -> bool:
        """Return whether `max_tokens` is 0: the token that is generated is neither returned nor billed."""
        return bool(self.echoed_parameters.get("hides_output"))

    @property
    def prompt_param(self) -> str:
        """Return the dialect's parameter name for the prompt."""
        if self.encoder.inputs:
            return self.encoder.param
        return "messages" if self.prompt and isinstance(self.prompt[0], dict) else "prompt"

    def change_analysis(self, **changes: Any) -> InferenceRequest:
        """Return the request with other values in its analysis."""
        return msgspec.structs.replace(self, analysis=msgspec.structs.replace(self.analysis, **changes))

    def select_prompt(self, number: int) -> InferenceRequest:
        """Return the request of one prompt. Number 1 is the first of `more_prompts`."""
        analysis = msgspec.structs.replace(self.analysis, number=number)
        prompt = self.more_prompts[number - 1]
        return msgspec.structs.replace(self, prompt=prompt, more_prompts=(), analysis=analysis)


class ResponseSpec(msgspec.Struct, frozen=True):
    """What a writer needs to write a response. It is stored with the claim, so any gateway can resume the stream."""

    dialect: str
    request_id: str
    model: str
    created: int  # Unix seconds
    prompt_tokens: int
    include_usage: bool = False
    continuous_usage: bool = False
    service_class: ServiceClass = ServiceClass.DEFAULT
    n: int = 1  # choices per prompt
    prompts: int = 1
    tools: list[str] = []  # names of the tools that the model may call
    tool_format: str = "hermes"  # format of tool calls
    # JSON types of the tools' parameters, if the format of the calls does not distinguish them
    parameter_types: dict[str, dict[str, list[str]]] = {}
    max_calls: int = 0  # further calls of an answer are dropped; 0: no limit
    expects_json: bool = False  # the text of an answer is JSON, so JSON without the marks of a call is no call
    echo: list[list[int]] | None = None  # the prompts' tokens, if the completions begin with them
    echoed_parameters: dict[str, Any] = {}
    checked: CheckedSchemas | None = None
    truncated: str = ""  # the number of truncated inputs of all inputs, such as "3 of 40"; empty: none
    last_prompt_ids: list[int | None] = []  # the last token of each prompt; without log-probabilities, of the first
    shows_special_tokens: bool = False  # the text has special tokens

    @property
    def answers(self) -> int:
        return self.n * self.prompts

    @property
    def hides_output(self) -> bool:
        """Return whether `max_tokens` is 0: the token that is generated is neither returned nor billed."""
        return bool(self.echoed_parameters.get("hides_output"))


encode_response_spec = msgspec.msgpack.Encoder().encode
decode_response_spec = msgspec.msgpack.Decoder(ResponseSpec).decode


class Writer(Protocol):
    """A writer of one response in one dialect, made by `writers.make_writer`.

    The same events always give the same output. To resume a stream, it is written again from the start and the part
    that the client has received is skipped.
    """

    def stream(self, event: AnswerEvent) -> list[bytes]:
        """Return the data of the server-sent events for this event, in order; possibly none."""

    def build_response(self, events: Sequence[AnswerEvent]) -> dict[str, Any]:
        """Return the complete response for a request without streaming. The last event is the end."""

    def interrupt(self, code: str, usage: TokenCounts | None) -> list[bytes]:
        """Return the data of the events with the usage, if requested, for a stream that an error ends.

        Args:
            code: of the error.
            usage: that is billed; None: the usage so far.
        """


def usage_so_far(spec: ResponseSpec, prompt: TokenCounts | None, output_tokens: int) -> TokenCounts:
    """Return the usage of a response in progress. `prompt` is the prompt's usage from the first event, if it came."""
    output = 0 if spec.hides_output else output_tokens
    return msgspec.structs.replace(prompt or TokenCounts(uncached=spec.prompt_tokens), output=output)
