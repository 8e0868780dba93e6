"""/v1/responses, and going on with one that is streamed."""

from __future__ import annotations

from millrace.gateway.core.errors import invalid
from millrace.gateway.core.types import ResponseSpec
from millrace.gateway.dispatch.stream_follower import StreamNotFound
from millrace.gateway.http.endpoints.inference import InferenceConsumer
from millrace.gateway.http.endpoints.resume import ResumeStream
from millrace.gateway.http.queries import read_query
from millrace.gateway.protocols.dialects import RESPONSES
from millrace.gateway.protocols.responses import body


class CreateResponse(InferenceConsumer):
    endpoint = "responses"
    words = RESPONSES
    dialect = reader = body.DIALECT


class ResumeResponse(ResumeStream):
    """GET a response as a stream, from the event after `starting_after` on."""

    endpoint = "responses"

    @property
    def stream_id(self) -> str:
        return "req_" + self.path_arguments["response_id"].removeprefix("resp_")

    def last_had(self) -> int:
        query = read_query(self.scope, "stream", "starting_after", "include_obfuscation")
        if query.get("stream") != "true":
            raise invalid("stream", "Responses are not stored: one can only be gone on with, with stream=true.")
        if query.get("include_obfuscation", "false") != "false":
            raise invalid("include_obfuscation", "Obfuscation is not supported.", "unsupported_parameter")
        number = query.get("starting_after")
        if number is None:
            return -1
        if not number.isascii() or not number.isdigit() or len(number) > 9:
            raise invalid("starting_after", "starting_after must be the sequence_number of an event.")
        return int(number)

    def check(self, form: ResponseSpec) -> None:
        if form.dialect != body.DIALECT:
            raise StreamNotFound
        super().check(form)
