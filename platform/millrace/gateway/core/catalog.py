"""The catalog of served models: their tokenizers and limits. Model weights are not loaded here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from inference_worker.contract.encoder_config import EncoderConfig, ModelTask, read_model_config
from inference_worker.contract.settings import ModelSpec, deployment_key
from inference_worker.contract.tokenizer import Tokenizer
from inference_worker.models.model_source import ensure_model

DEFAULT_MAX_OUTPUT = 1024  # tokens, if the request does not set a limit


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
    directory: Path = Path()  # with the model's files, for the prompt processes
    version: str = ""
    weights: tuple[str, ...] = ()  # source, revision, dtype and quantization of the weights
    parsers: tuple[str, str] = ("", "")  # as configured, of tool calls and of reasoning

    @property
    def key(self) -> str:
        """The name with the version, by which requests are dispatched."""
        return deployment_key(self.name, self.version)

    @property
    def task(self) -> ModelTask:
        if self.is_cross_encoder:
            return "rerank"
        return "embed" if self.vector_sizes else "generate"


def load_catalog(specs: Sequence[ModelSpec], data_dir: Path) -> Mapping[str, ServedModel]:
    """Read each model's tokenizer and limits, and return the deployments by name."""
    models: dict[str, ServedModel] = {}
    for spec in specs:
        models[spec.name] = load_served_model(spec, data_dir, models.values())
    return models


def load_served_model(spec: ModelSpec, data_dir: Path, others: Iterable[ServedModel] = ()) -> ServedModel:
    """Read a deployment's tokenizer and limits. Deployments of one model share its tokenizer with `others`.

    Raises:
        ModelError: the source is missing, damaged or not supported.
    """
    directory = ensure_model(spec, data_dir, None)
    config = read_model_config(directory)
    encoder = config if isinstance(config, EncoderConfig) else None
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
        version=spec.version,
        weights=(spec.source, spec.revision, spec.dtype, spec.quantization),
        parsers=parsers,
        created=int((directory / "config.json").stat().st_mtime),
    )
