"""The writer of each dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from inference_worker.checkpoints.tokenizer import Tokenizer
from millrace.gateway.core.types import ResponseSpec, Writer
from millrace.gateway.protocols import rerank
from millrace.gateway.protocols.anthropic import messages
from millrace.gateway.protocols.anthropic.writer import MessagesWriter
from millrace.gateway.protocols.openai import chat, completions, embeddings
from millrace.gateway.protocols.openai.embeddings import EmbeddingsWriter
from millrace.gateway.protocols.openai.writer import ChatWriter, CompletionWriter
from millrace.gateway.protocols.responses import body as responses
from millrace.gateway.protocols.responses.writer import ResponsesWriter

WRITERS: Mapping[str, Callable[[ResponseSpec, Tokenizer], Writer]] = {
    chat.DIALECT: ChatWriter,
    completions.DIALECT: CompletionWriter,
    embeddings.DIALECT: EmbeddingsWriter,
    rerank.RERANK: rerank.RerankWriter,
    rerank.SCORE: rerank.ScoreWriter,
    messages.DIALECT: MessagesWriter,
    responses.DIALECT: ResponsesWriter,
}


def make_writer(spec: ResponseSpec, tokenizer: Tokenizer) -> Writer:
    """Return a writer for one response. `tokenizer` is the tokenizer of the response's model."""
    return WRITERS[spec.dialect](spec, tokenizer)
