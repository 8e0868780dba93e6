"""The job message of an execution, built from the admitted request."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac

from inference_worker.contract.messages import BillingContext, InferenceJob
from millrace.gateway.admission.admission import AdmissionGrant, AdmissionRequest
from millrace.gateway.core import tracing
from millrace.gateway.core.types import InferenceRequest, Prompt
from millrace.gateway.protocols import tools


class InferenceJobBuilder:
    def __init__(self, gateway_id: str, prefix_cache_secret: str, request_seconds: int) -> None:
        self._gateway_id = gateway_id
        self._prefix_cache_secret = prefix_cache_secret.encode()
        self._request_seconds = request_seconds

    def billing_context(self, demand: AdmissionRequest, grant: AdmissionGrant, *, execution: int) -> BillingContext:
        """Return the billing context of an execution, for the first of the request's candidates."""
        key = demand.key
        return BillingContext(
            admitted_at=demand.admitted_at,
            request_id=demand.request_id,
            execution=execution,
            tenant_id=key.tenant_id,
            project_id=key.project_id,
            key_id=key.key_id,
            model=demand.candidates[0].model.name,
            price_version=grant.price_version,
            lease_id=grant.lease_id,
            fencing_token=grant.fencing_token,
            reserved_nano=grant.reserved_nano,
            reserved_tokens=grant.reserved_tokens,
            traceparent=tracing.current(),
        )

    def make(
        self,
        billing_context: BillingContext,
        demand: AdmissionRequest,
        grant: AdmissionGrant,
        request: InferenceRequest,
        prompt: Prompt,
    ) -> InferenceJob:
        """Return the job of an execution."""
        return InferenceJob(
            billing_context=billing_context,
            gateway_id=self._gateway_id,
            prompt_token_ids=prompt.ids,
            params=dataclasses.replace(request.sampling, max_tokens=grant.max_tokens),
            cache_salt=self._cache_salt(billing_context.tenant_id, billing_context.model, request.cache_key),
            deadline=demand.admitted_at / 1e6 + self._request_seconds,
            weight=demand.key.weight,
            service_class=request.service_class,
            priority=request.priority,
            breakpoints=prompt.breakpoints,
            input_lengths=prompt.input_lengths,
            structured=tools.spec(request) or request.structured,
        )

    def _cache_salt(self, tenant_id: int, model: str, cache_key: str | None) -> bytes:
        """Derive the cache salt from a secret, so that no tenant can hit or forge another tenant's cached prefixes."""
        name = f"{tenant_id}\0{model}\0{cache_key or ''}".encode()
        return hmac.new(self._prefix_cache_secret, name, hashlib.sha256).digest()[:16]
