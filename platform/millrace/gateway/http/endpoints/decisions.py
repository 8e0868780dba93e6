"""GET /v1/requests/{request_id}/decisions: the request's decision record, stored as long as its stream."""

from __future__ import annotations

from typing import Any

import msgspec

from millrace.gateway.core.errors import ApiError
from millrace.gateway.dispatch.dispatcher import decision_record_key
from millrace.gateway.http.consumer import HttpConsumer


class DecisionRecord(HttpConsumer):
    endpoint = "decisions"
    method = "GET"

    async def handle(self) -> None:
        key = await self.authenticate("inference")
        request_id = self.path_arguments["request_id"]
        stored: Any = await self.gateway.broker.get(decision_record_key(request_id))
        decision_record = {} if stored is None else msgspec.json.decode(stored)
        if decision_record.pop("tenant", None) != key.tenant_id:
            raise ApiError("not_found", f"There is no request {request_id!r}, or it is no longer stored.")
        await self.respond_json(200, {"id": request_id, **decision_record})
