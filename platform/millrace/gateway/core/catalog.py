"""The catalog of served models: their tokenizers and limits, from the bundles that workers publish.

A gateway needs no model files and no weights (inference_worker.contract.model_bundles).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from inference_worker.checkpoints.bundle_files import StoredBundle
from inference_worker.checkpoints.encoder_config import EncoderConfig, ModelTask, read_model_config
from inference_worker.checkpoints.sampling_files import read_sampling_defaults
from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.sampling_defaults import SamplingDefaults
from inference_worker.contract.settings import ModelSpec, deployment_key
from inference_worker.contract.upstream_presets import preset_of
from inference_worker.contract.upstreams import UpstreamSpec
from millrace.gateway.core.errors import ApiError

DEFAULT_MAX_OUTPUT = 1024  # tokens, if the request does not set a limit
MAX_DIMENSIONS = 65_536  # dimensions of an upstream's vectors, if their number is unknown


@dataclass(frozen=True)
class ServedModel:
    """A deployment: a model that this platform serves under a name."""

    name: str
    tokenizer: Tokenizer
    context_length: int  # tokens of prompt and completion together, or of one input of an encoder
    vocab_size: int
    created: int  # Unix seconds
    # Embedding models only: the possible numbers of dimensions, the largest last.
    vector_sizes: tuple[int, ...] = ()
    is_cross_encoder: bool = False
    input_prompt: str = ""  # embedding models: precedes every text; cross-encoders that render pairs: the instruction
    # Cross-encoders that render pairs: the template, or empty for the model's chat template.
    pair_template: str | None = None
    default_max_output: int = DEFAULT_MAX_OUTPUT
    sampling_defaults: SamplingDefaults = ()  # sampling parameters of requests that do not set them
    checkpoint_sampling: SamplingDefaults = ()  # those of the model's files
    directory: Path = Path()  # with the files of the bundle, for the prompt processes
    bundle: str = ""  # SHA-256 of the bundle
    version: str = ""
    weights: tuple[str, ...] = ()  # source, revision, dtypes and quantization
    parsers: tuple[str, str] = ("", "")  # as configured, of tool calls and of reasoning
    upstream: UpstreamSpec | None = None  # another server that runs the model
    separates_contents: bool = True  # control tokens in contents of conversations are tokenized as text
    truncates_inputs: bool = True  # encoders: longer inputs are truncated if the request does not say

    @property
    def key(self) -> str:
        """The name with the version, by which requests are dispatched."""
        return deployment_key(self.name, self.version)

    @property
    def tokenization(self) -> tuple[object, ...]:
        """Everything of the deployment that the tokens of a request depend on. Equal ones have equal prompts."""
        if self.task == "generate":
            return self.tokenizer, self.separates_contents
        return self.tokenizer, self.separates_contents, self.context_length, self.truncates_inputs

    @property
    def task(self) -> ModelTask:
        if self.is_cross_encoder:
            return "rerank"
        return "embed" if self.vector_sizes else "generate"


class UnknownTokenizer(Tokenizer):
    """The tokenizer of a model that an upstream runs. Its tokens are unknown."""

    def __init__(self) -> None:
        self.vocab_size = 0
        self.longest_token_bytes = 1
        self.eos_token_ids = ()
        self.tool_format = None
        self.reasoning_format = None

    def encode(self, text: str, *, add_special_tokens: bool = True, separator: str = "") -> list[int]:
        raise _no_tokens()

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        raise _no_tokens()

    def spell(self, token_id: int, *, begins_text: bool = False) -> bytes:
        raise _no_tokens()


def _no_tokens() -> ApiError:
    message = "Another server runs this model, and its tokenizer is unknown. Use a model that Millrace runs."
    return ApiError("unsupported_parameter", message, "model")


def upstream_model(name: str, version: str, upstream: UpstreamSpec) -> ServedModel:
    """Return a deployment whose model another server runs.

    Raises:
        ValueError: its preset does not exist.
    """
    preset_of(upstream)
    sizes = (upstream.dimensions or MAX_DIMENSIONS,) if upstream.task == "embed" else ()
    return ServedModel(
        name=name,
        tokenizer=UnknownTokenizer(),
        context_length=upstream.context_length,
        vocab_size=0,
        vector_sizes=sizes,
        version=version,
        weights=(upstream.base_url, upstream.model),
        upstream=upstream,
        created=int(time.time()),
    )


def load_served_model(spec: ModelSpec, bundle: StoredBundle, others: Iterable[ServedModel] = ()) -> ServedModel:
    """Read a deployment's tokenizer and limits. Deployments of one bundle share its tokenizer with `others`.

    Raises:
        ModelError: a file of the bundle is missing, damaged or not supported.
    """
    directory = bundle.directory
    config = read_model_config(directory)
    encoder = config if isinstance(config, EncoderConfig) else None
    sampling = () if encoder else read_sampling_defaults(directory, spec.source)
    scoring = None if encoder is None else encoder.pair_scoring
    parsers = spec.tool_parser, spec.reasoning_parser
    tokenizer = next(
        (each.tokenizer for each in others if each.directory == directory and each.parsers == parsers), None
    )
    return ServedModel(
        name=spec.name,
        tokenizer=tokenizer
        or Tokenizer.from_dir(
            directory,
            tool_parser=parsers[0],
            reasoning_parser=parsers[1],
            chat_template=scoring.template if scoring else "",
        ),
        context_length=min(config.max_model_len, spec.max_model_len or config.max_model_len),
        vocab_size=config.vocab_size,
        vector_sizes=() if encoder is None or encoder.is_cross_encoder else (*encoder.shorter, encoder.hidden_size),
        input_prompt="" if encoder is None else encoder.prompt,
        is_cross_encoder=encoder is not None and encoder.is_cross_encoder,
        pair_template=scoring.template if scoring else None,
        directory=directory,
        bundle=bundle.digest,
        version=spec.version,
        weights=(spec.source, spec.revision, spec.dtype, spec.quantization, spec.kv_cache_dtype),
        parsers=parsers,
        sampling_defaults=sampling,
        checkpoint_sampling=sampling,
        separates_contents=spec.control_tokens == "template",
        created=bundle.created,
    )
