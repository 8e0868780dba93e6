"""GET /v1/requests/{request_id}/decisions: the decision record of a request of the key's project.

It is read from Valkey while the request's stream is retained, and from the request log after that.
"""

from __future__ import annotations

from typing import Any, LiteralString

import msgspec

from millrace.gateway.core.errors import ApiError
from millrace.gateway.dispatch.dispatcher import decision_record_key
from millrace.gateway.http.consumer import HttpConsumer
from tenants.keys.snapshot import ApiKeySnapshot

MAX_ID_LENGTH = 64
_LOGGED: LiteralString = """
SELECT requested_model, served_model, route, placements FROM request_log_requestrecord
WHERE tenant_id = %s AND project_id = %s AND request_id = %s ORDER BY started_at DESC LIMIT 1
"""


class DecisionsEndpoint(HttpConsumer):
    endpoint = "decisions"
    method = "GET"

    async def handle(self) -> None:
        key = await self.authenticate("inference")
        request_id = self.path_arguments["request_id"]
        stored: Any = await self.gateway.broker.get(decision_record_key(request_id))
        decision_record = {} if stored is None else msgspec.json.decode(stored)
        owner = decision_record.pop("tenant", None), decision_record.pop("project", None)
        if owner != (key.tenant_id, key.project_id):
            decision_record = await self._read_logged(key, request_id)
        await self.respond_json(200, {"id": request_id, **decision_record})

    async def _read_logged(self, key: ApiKeySnapshot, request_id: str) -> dict[str, Any]:
        """Return the record from the request log.

        Raises:
            ApiError: 404, there is none; 503, the database is unavailable.
        """
        row = None
        if len(request_id) <= MAX_ID_LENGTH:
            async with self.gateway.tenant_db.tenant_transaction(key.tenant_id) as connection:
                row = await (await connection.execute(_LOGGED, [key.tenant_id, key.project_id, request_id])).fetchone()
        if row is None:
            raise ApiError("not_found", f"There is no request {request_id!r}, or it is no longer stored.")
        served = {"served_model": row["served_model"]} if row["served_model"] else {}
        return {"requested_model": row["requested_model"], **served, **row["route"], "executions": row["placements"]}
