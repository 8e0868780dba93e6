"""What docs/openapi.yaml says of each endpoint beyond its route, method, dialect and request type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from millrace.gateway.http.consumer import HttpConsumer
from millrace.gateway.http.endpoints import batches, feedback, files, message_batches, messages, models, responses
from millrace.gateway.http.endpoints.decisions import DecisionsEndpoint
from millrace.gateway.http.endpoints.inference import ChatCompletions, Completions, Embeddings, Rerank, Score
from millrace.gateway.http.endpoints.resume import ResumeStream
from millrace.gateway.protocols.anthropic.messages import CountBody, MessagesBody
from millrace.gateway.protocols.openai.chat import ChatBody
from millrace.gateway.protocols.openai.completions import CompletionBody
from millrace.gateway.protocols.openai.embeddings import EmbeddingBody
from millrace.gateway.protocols.rerank import RerankBody, ScoreBody
from millrace.gateway.protocols.responses.body import ResponseBody

Json = dict[str, Any]
_STREAM = "The completion, as one object or as server-sent events. The last event is `data: [DONE]`."


@dataclass(frozen=True)
class Operation:
    """The description of one endpoint."""

    name: str  # operationId
    response: str  # description of the response
    schema: str = ""  # schema of a JSON response
    anthropic_schema: str = ""  # schema of the JSON response to Anthropic's clients, if it differs
    body: type[msgspec.Struct] | None = None
    form: Json | None = None  # schema of a multipart body
    events: str | None = None  # schema of the events of a streamed response; empty: any
    content_types: tuple[str, ...] = ()  # types of other responses
    summary: str = ""
    parameters: tuple[Json, ...] = ()
    statuses: tuple[int, ...] = (200,)
    is_own: bool = False  # not in a vendor's API


def query(name: str, *, required: bool = False, description: str = "", **schema: Any) -> Json:
    """Return a query parameter."""
    extra: Json = ({"required": True} if required else {}) | ({"description": description} if description else {})
    return {"name": name, "in": "query", **extra, "schema": {"type": "string"} | schema}


def limit(default: int, maximum: int) -> Json:
    """Return the query parameter for the size of a page."""
    return query("limit", type="integer", minimum=1, maximum=maximum, default=default)


def header(name: str, description: str, **schema: Any) -> Json:
    """Return a request header."""
    return {"name": name, "in": "header", "description": description, "schema": {"type": "string"} | schema}


_SECONDS = {"minimum": files.MIN_RETENTION_SECONDS, "maximum": files.DEFAULT_RETENTION_SECONDS}
_FILE_FORM: Json = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": {"type": "string", "const": "batch"},
        "expires_after[anchor]": {"type": "string", "const": "created_at"},
        "expires_after[seconds]": {"type": "integer", **_SECONDS},
    },
}

OPERATIONS: dict[type[HttpConsumer], Operation] = {
    ChatCompletions: Operation(
        "createChatCompletion", _STREAM, "ChatCompletion", body=ChatBody, events="ChatCompletionChunk"
    ),
    Completions: Operation("createCompletion", _STREAM, "Completion", body=CompletionBody, events="Completion"),
    Embeddings: Operation("createEmbedding", "The vectors.", "Embeddings", body=EmbeddingBody),
    Rerank: Operation(
        "createRerank",
        "The documents, most relevant first.",
        "Reranked",
        body=RerankBody,
        summary="Rank documents by their relevance to a query.",
    ),
    Score: Operation(
        "createScore",
        "The score of each pair, in the order of the request.",
        "Scores",
        body=ScoreBody,
        summary="Score pairs of texts.",
    ),
    responses.CreateResponse: Operation(
        "createResponse",
        "The response, as one object or as numbered server-sent events.",
        "Response",
        body=ResponseBody,
        events="ResponseEvent",
    ),
    responses.ResumeResponse: Operation(
        "resumeResponse",
        "The events after `starting_after`.",
        events="ResponseEvent",
        summary="Resume a streamed response while it is stored.",
        parameters=(
            query("stream", required=True, type="boolean", const=True),
            query(
                "starting_after",
                description="The `sequence_number` of the last event that you received.",
                type="integer",
                minimum=0,
                maximum=999_999_999,
            ),
            query("include_obfuscation", type="boolean", const=False),
        ),
    ),
    models.ModelsEndpoint: Operation(
        "listModels",
        "The models that this key may use: all of them, or a page.",
        "Models",
        "AnthropicModels",
        parameters=(query("after"), query("after_id"), query("before_id"), limit(1000, 1000)),
    ),
    models.ModelEndpoint: Operation("getModel", "The model.", "Model", "AnthropicModel"),
    files.FilesEndpoint: Operation(
        "listFiles",
        "A page of files.",
        "Files",
        parameters=(
            query("after"),
            limit(10_000, 10_000),
            query("order", enum=["asc", "desc"], default="desc"),
            query("purpose"),
        ),
    ),
    files.CreateFile: Operation("createFile", "The file.", "File", form=_FILE_FORM),
    files.FileEndpoint: Operation("getFile", "The file.", "File"),
    files.DeleteFile: Operation("deleteFile", "The file is deleted.", "FileDeleted"),
    files.FileContent: Operation(
        "getFileContent", "The bytes of the file.", content_types=("application/octet-stream", "application/x-jsonl")
    ),
    batches.BatchesEndpoint: Operation(
        "listBatches", "A page of batches.", "Batches", parameters=(query("after"), limit(20, 100))
    ),
    batches.CreateBatch: Operation("createBatch", "The batch.", "Batch", body=batches.BatchBody),
    batches.BatchEndpoint: Operation("getBatch", "The batch.", "Batch"),
    batches.CancelBatch: Operation("cancelBatch", "The batch.", "Batch"),
    messages.Messages: Operation(
        "createMessage",
        "The message, as one object or as named server-sent events.",
        "Message",
        body=MessagesBody,
        events="MessageEvent",
    ),
    messages.CountTokens: Operation("countTokens", "The number of tokens of the prompt.", "TokenCount", body=CountBody),
    message_batches.MessageBatches: Operation(
        "listMessageBatches",
        "A page of batches.",
        "MessageBatches",
        parameters=(query("after_id"), query("before_id"), limit(20, 1000)),
    ),
    message_batches.CreateMessageBatch: Operation(
        "createMessageBatch", "The batch.", "MessageBatch", body=message_batches.MessageBatchBody
    ),
    message_batches.MessageBatch: Operation("getMessageBatch", "The batch.", "MessageBatch"),
    message_batches.DeleteMessageBatch: Operation("deleteMessageBatch", "The batch is deleted.", "MessageBatchDeleted"),
    message_batches.CancelMessageBatch: Operation("cancelMessageBatch", "The batch.", "MessageBatch"),
    message_batches.MessageBatchResults: Operation(
        "getMessageBatchResults", "A line for each request.", content_types=("application/x-jsonl",)
    ),
    ResumeStream: Operation(
        "resumeStream",
        "The events after the last one received, in the dialect of the request.",
        events="",
        summary="Resume a stream while it is stored.",
        parameters=(header("Last-Event-ID", "The ID of the last event that you received."),),
        is_own=True,
    ),
    DecisionsEndpoint: Operation(
        "getDecisions",
        "The decision record.",
        "Decisions",
        summary="Return the routing decisions of a request.",
        is_own=True,
    ),
    feedback.SubmitFeedback: Operation(
        "submitFeedback",
        "The feedback.",
        "Feedback",
        body=feedback.FeedbackBody,
        summary="Submit feedback on a request, once.",
        statuses=(200, 201),
        is_own=True,
    ),
}
