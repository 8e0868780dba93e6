"""Checks of a model's source on this machine, before its deployment is added or changed."""

from __future__ import annotations

from pathlib import Path

from inference_worker.checkpoints.draft_check import read_draft_config
from inference_worker.checkpoints.encoder_config import EncoderConfig, read_model_config
from inference_worker.checkpoints.inspection import inspect_checkpoint
from inference_worker.checkpoints.model_config import ModelConfig, ModelError
from inference_worker.checkpoints.model_source import embedded_source
from inference_worker.contract.settings import EMBEDDED, SELF_DRAFT, ModelSpec
from inference_worker.contract.texts import Text, text_of
from tenants.actions.common import FieldRefused


def check_source(spec: ModelSpec) -> None:
    """Check on this machine that the engine can load the source: its configuration, files and tokenizer.

    No weights are read, nothing is converted, and memory is not checked.

    Raises:
        FieldRefused: the source is missing, or its model is not supported.
    """
    try:
        path = _find_source("source", spec.source)
        if spec.quantization == "gguf" and path.suffix != ".gguf":
            raise FieldRefused(
                "quantization", "invalid", Text("Only a .gguf file has blocks to keep. Choose another one.")
            )
        # The embedded models are part of the installation.
        config = _inspect(path) if spec.source not in EMBEDDED else read_model_config(path) if path.is_dir() else None
    except (ModelError, OSError, RuntimeError) as exc:  # RuntimeError: a home directory of an unknown user
        raise _refusal(text_of(exc)) from exc
    if spec.max_model_len and config and spec.max_model_len > config.max_model_len:
        message = Text(
            "The model's context has %(max_model_len)s tokens. Enter at most that many.",
            max_model_len=config.max_model_len,
        )
        raise FieldRefused("max_model_len", "invalid", message)
    if spec.draft_model and not spec.draft_model.startswith(SELF_DRAFT):
        _check_draft(path, spec.draft_model)


def _inspect(path: Path) -> ModelConfig | EncoderConfig | None:
    """Return the configuration of a checkpoint that the engine can load.

    Raises:
        FieldRefused: the engine cannot load it. ModelError: it cannot be read.
    """
    report = inspect_checkpoint(path)
    if report.problems:
        raise _refusal("; ".join(problem.message.removesuffix(".") for problem in report.problems))
    return report.config


def _find_source(field: str, source: str) -> Path:
    """Return the path of a model's source on this machine.

    Raises:
        FieldRefused: it is missing. ModelError, RuntimeError: it cannot be found.
    """
    path = embedded_source(source) if source in EMBEDDED else Path(source).expanduser()
    if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        return path
    message = Text(
        "%(path)s is neither a model directory nor a .gguf file on this machine. "
        "Set force to use it anyway, if its workers have it.",
        path=path,
    )
    raise FieldRefused(field, "invalid", message)


def _check_draft(path: Path, draft_source: str) -> None:
    """Check that a draft model exists, and has the vocabulary of the model if both are directories.

    Raises:
        FieldRefused: it is missing, is not supported or has another vocabulary.
    """
    try:
        draft = _find_source("draft_model", draft_source)
        if draft.is_dir() and path.is_dir():
            read_draft_config(path, draft)
    except (ModelError, OSError, RuntimeError) as exc:
        raise FieldRefused("draft_model", "invalid", Text("%(error)s.", error=text_of(exc))) from exc


def _refusal(reason: str) -> FieldRefused:
    message = Text("%(reason)s. Set force to use it anyway, if its workers can load it.", reason=reason)
    return FieldRefused("source", "invalid", message)
