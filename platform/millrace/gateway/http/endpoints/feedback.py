"""POST /v1/requests/{request_id}/feedback: the client's feedback on a request, stored once."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from psycopg.types.json import Jsonb

from inference_worker.contract.messages import claim_key
from inference_worker.contract.request import document
from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.http.consumer import HttpConsumer
from millrace.gateway.protocols.documented import LabelMap
from millrace.gateway.protocols.openai.parameters import check_labels, read_body
from tenants.keys.snapshot import ApiKeySnapshot

MAX_LABEL_CHARACTERS = 64
_INSERT = """
INSERT INTO feedback_submittedfeedback (tenant_id, request_id, key_id, success, score, label, metadata)
VALUES (%(tenant)s, %(request)s, %(key)s, %(success)s, %(score)s, %(label)s, %(metadata)s)
ON CONFLICT DO NOTHING
"""
_FIND = "SELECT * FROM feedback_submittedfeedback WHERE request_id = %(request)s"
_VALUE_FIELDS = ("success", "score", "label", "metadata")


class FeedbackBody(msgspec.Struct, forbid_unknown_fields=True):
    success: bool | None = None
    score: Annotated[float, document(minimum=0, maximum=1)] | None = None
    label: Annotated[str, document(minLength=1, maxLength=MAX_LABEL_CHARACTERS)] | None = None
    metadata: LabelMap | None = None


class SubmitFeedback(HttpConsumer):
    endpoint = "feedback"

    async def handle(self) -> None:
        key = await self.authenticate("inference")
        request_id = self.path_arguments["request_id"]
        feedback = _read(await self.read_body())
        await self._require_request(key, request_id)
        reported = {name: getattr(feedback, name) for name in _VALUE_FIELDS}
        values = {**reported, "tenant": key.tenant_id, "key": key.key_id, "request": request_id}
        values["metadata"] = None if feedback.metadata is None else Jsonb(feedback.metadata)
        async with self.gateway.tenant_db.tenant_transaction(key.tenant_id) as connection:
            is_new = (await connection.execute(_INSERT, values)).rowcount
            row = await (await connection.execute(_FIND, values)).fetchone()
        if row is None or any(row[name] != value for name, value in reported.items()):
            raise ApiError("feedback_conflict", f"The request {request_id!r} has different feedback already.")
        reported_at = int(row["reported_at"].timestamp())
        response = {"id": request_id, "object": "request.feedback", **reported, "reported_at": reported_at}
        await self.respond_json(201 if is_new else 200, response)

    async def _require_request(self, key: ApiKeySnapshot, request_id: str) -> None:
        """Check that the request belongs to the key's project, and that its stream is stored or it is settled."""
        owner: Any = await self.gateway.broker.hmget(claim_key(request_id, 0), "tenant", "project")
        if owner == [str(key.tenant_id).encode(), str(key.project_id).encode()]:
            return
        async with self.gateway.tenant_db.tenant_transaction(key.tenant_id) as connection:
            found = await connection.execute(
                "SELECT FROM billing_usageevent WHERE request_id = %s AND project_id = %s LIMIT 1",
                [request_id, key.project_id],
            )
            if found.rowcount:
                return
        raise ApiError("not_found", f"There is no request {request_id!r}.")


def _read(body: bytes) -> FeedbackBody:
    feedback = read_body(body, FeedbackBody)
    if feedback.success is None and feedback.score is None and feedback.label is None:
        raise invalid("success", "Report success, score or label.", "missing_required_parameter")
    if feedback.score is not None and not 0 <= feedback.score <= 1:
        raise invalid("score", "score must be from 0 to 1.")
    if feedback.label is not None and not 0 < len(feedback.label) <= MAX_LABEL_CHARACTERS:
        raise invalid("label", f"label must have 1 to {MAX_LABEL_CHARACTERS} characters.")
    check_labels(feedback.metadata or {}, {})
    return feedback
