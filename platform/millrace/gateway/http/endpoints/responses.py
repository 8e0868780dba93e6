"""/v1/responses, and the resumption of a streamed response."""

from __future__ import annotations

from millrace.gateway.core.errors import invalid
from millrace.gateway.core.types import ResponseSpec
from millrace.gateway.dispatch.stream_follower import StreamNotFound
from millrace.gateway.http.endpoints.inference import InferenceConsumer
from millrace.gateway.http.endpoints.resume import ResumeStream
from millrace.gateway.protocols.dialects import RESPONSES
from millrace.gateway.protocols.responses import body


class CreateResponse(InferenceConsumer):
    endpoint = "responses"
    api_dialect = RESPONSES
    dialect = reader = body.DIALECT


class ResumeResponse(ResumeStream):
    """Resume a response's stream after the event `starting_after`."""

    endpoint = "responses"
    query_names = ("stream", "starting_after", "include_obfuscation")

    @property
    def stream_id(self) -> str:
        return "req_" + self.path_arguments["response_id"].removeprefix("resp_")

    def last_received(self) -> int:
        query = self.query
        if query.get("stream") != "true":
            raise invalid("stream", "Responses are not stored. To resume one, pass stream=true.")
        if query.get("include_obfuscation", "false") != "false":
            raise invalid("include_obfuscation", "Obfuscation is not supported.", "unsupported_parameter")
        text = query.get("starting_after")
        if text is None:
            return -1
        if not text.isascii() or not text.isdigit() or len(text) > 9:
            raise invalid("starting_after", "starting_after must be the sequence_number of an event.")
        return int(text)

    def check(self, response_spec: ResponseSpec) -> None:
        if response_spec.dialect != body.DIALECT:
            raise StreamNotFound
        super().check(response_spec)
