"""GET /v1/requests/{request_id}/decisions: the routing decisions of a request, stored as long as its stream."""

from __future__ import annotations

from typing import Any

import msgspec

from millrace.gateway.core.errors import ApiError
from millrace.gateway.dispatch.dispatcher import why_key
from millrace.gateway.http.consumer import HttpConsumer


class DecisionRecord(HttpConsumer):
    endpoint = "decisions"
    method = "GET"

    async def handle(self) -> None:
        key = await self.authenticate("inference")
        request_id = self.path_arguments["request_id"]
        kept: Any = await self.gateway.broker.get(why_key(request_id))
        why = {} if kept is None else msgspec.json.decode(kept)
        if why.pop("tenant", None) != key.tenant_id:
            raise ApiError("not_found", f"There is no request {request_id!r}, or it is no longer kept.")
        await self.respond_json(200, {"id": request_id, **why})
