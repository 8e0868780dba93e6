"""The catalog of served models: their tokenizers and limits. Model weights are not loaded here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from inference_worker.contract.encoder_config import EncoderConfig, ModelTask, read_model_config
from inference_worker.contract.settings import ModelSpec
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

    @property
    def task(self) -> ModelTask:
        if self.is_cross_encoder:
            return "rerank"
        return "embed" if self.vector_sizes else "generate"


def load_catalog(specs: Sequence[ModelSpec], data_dir: Path) -> Mapping[str, ServedModel]:
    """Read each model's tokenizer and limits, and return the deployments by name."""
    tokenizers: dict[tuple[Path, str, str], Tokenizer] = {}  # shared by the deployments of one model
    return {spec.name: _load(spec, data_dir, tokenizers) for spec in specs}


def _load(spec: ModelSpec, data_dir: Path, tokenizers: dict[tuple[Path, str, str], Tokenizer]) -> ServedModel:
    directory = ensure_model(spec, data_dir, None)
    config = read_model_config(directory)
    encoder = config if isinstance(config, EncoderConfig) else None
    scoring = None if encoder is None else encoder.pair_scoring
    key = directory, spec.tool_parser, spec.reasoning_parser
    if key not in tokenizers:
        tokenizers[key] = Tokenizer.from_dir(
            directory,
            tool_parser=spec.tool_parser,
            reasoning_parser=spec.reasoning_parser,
            chat_template=scoring.template if scoring else "",
        )
    return ServedModel(
        name=spec.name,
        tokenizer=tokenizers[key],
        context_length=min(config.max_model_len, spec.max_model_len or config.max_model_len),
        vocab_size=config.vocab_size,
        vector_sizes=() if encoder is None or encoder.is_cross_encoder else (*encoder.shorter, encoder.hidden_size),
        input_prompt="" if encoder is None else encoder.prompt,
        is_cross_encoder=encoder is not None and encoder.is_cross_encoder,
        pair_template=scoring.template if scoring else None,
        directory=directory,
        created=int((directory / "config.json").stat().st_mtime),
    )
