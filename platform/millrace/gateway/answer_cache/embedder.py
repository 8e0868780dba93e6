"""Vectors of questions and answers, computed by the embedding deployment of the semantic cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from inference_worker.contract.messages import Vectors
from inference_worker.contract.request import SamplingParams
from millrace.gateway.answer_cache.side_executions import SideExecutions
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.decision_record import DecisionRecord
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import EncoderInputs, InferenceRequest, Prompt, ResponseSpec
from millrace.gateway.dispatch.execution import Execution
from millrace.gateway.protocols.prompt_bounds import max_characters
from millrace.gateway.routing.router import Router
from tenants.keys.snapshot import ApiKeySnapshot

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_DIALECT = "openai.embedding"


class QuestionEmbedder:
    """Sends texts to the embedding deployment."""

    def __init__(self, model: str, router: Router, executions: SideExecutions) -> None:
        self._model = model
        self._router = router
        self._executions = executions

    @property
    def model(self) -> ServedModel | None:
        """Return the deployment; None if it is not served or does not embed."""
        model = self._router.find_served(self._model) if self._model else None
        return model if model is not None and model.task == "embed" and model.upstream is None else None

    async def embed(
        self,
        key: ApiKeySnapshot,
        name: str,
        text: str,
        *,
        is_operator_paid: bool = False,
        on_start: Callable[[Execution], None] | None = None,
    ) -> NDArray[np.float32] | None:
        """Return the vector of a text, of length 1; None if the text is too long for the model.

        Args:
            key: of the request that the text is from.
            name: the ID of the execution.
            is_operator_paid: the tenant does not pay for the vector.
            on_start: receives the execution when it has been sent.

        Raises:
            ApiError: it cannot be computed now.
        """
        model = self.model
        if model is None:
            raise ApiError("model_not_found", "The embedding deployment of the semantic cache is not served.")
        text = model.input_prompt + text
        if len(text) > max_characters(model):  # tokenizing it would delay all requests
            return None
        ids = model.tokenizer.encode(text)
        if not 0 < len(ids) <= model.context_length:
            return None
        request = InferenceRequest(model.name, [], SamplingParams(max_tokens=0), 0, encoder=EncoderInputs((ids,)))
        prompt = Prompt(ids, input_lengths=(len(ids),))
        spec = ResponseSpec(_DIALECT, name, model.name, int(time.time()), len(ids))
        _, events = await self._executions.run(
            name,
            key,
            request,
            prompt,
            model,
            spec,
            DecisionRecord(),
            is_operator_paid=is_operator_paid,
            on_start=on_start,
        )
        data = b"".join(event.data for event in events if isinstance(event, Vectors))
        import numpy as np  # 14 MB in a gateway whose tenants receive no semantic hits

        vector = np.frombuffer(data, "<f4")
        return (vector / max(float(np.linalg.norm(vector)), 1e-9)).astype(np.float32)

    async def discard(self, execution: Execution) -> None:
        """Do not bill the execution of a vector, even if it has ended."""
        await self._executions.discard(execution)
