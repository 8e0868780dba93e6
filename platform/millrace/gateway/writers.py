"""Which writer answers in which dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from inference_worker.engine.tokenizer import Tokenizer
from millrace.gateway.anthropic import messages
from millrace.gateway.anthropic.writer import MessagesWriter
from millrace.gateway.forms import Form, Writer
from millrace.gateway.openai import chat, completions, embeddings
from millrace.gateway.openai.embeddings import EmbeddingsWriter
from millrace.gateway.openai.writer import ChatWriter, CompletionWriter
from millrace.gateway.responses import body as responses
from millrace.gateway.responses.writer import ResponsesWriter

WRITERS: Mapping[str, Callable[[Form, Tokenizer], Writer]] = {
    chat.DIALECT: ChatWriter,
    completions.DIALECT: CompletionWriter,
    embeddings.DIALECT: EmbeddingsWriter,
    messages.DIALECT: MessagesWriter,
    responses.DIALECT: ResponsesWriter,
}


def make_writer(form: Form, tokenizer: Tokenizer) -> Writer:
    """`tokenizer`: of the form's model."""
    return WRITERS[form.dialect](form, tokenizer)
