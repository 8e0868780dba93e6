"""The job message of an execution, built from the admitted request."""

from __future__ import annotations

import hmac

import msgspec

from inference_worker.contract.messages import InferenceJob
from inference_worker.contract.request import SamplingParams
from inference_worker.contract.upstream_presets import preset_of
from inference_worker.contract.upstreams import UpstreamEngine, UpstreamRequest
from millrace.gateway.admission.admission import AdmissionRequest, AdmittedRequest
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.protocols import tools


class InferenceJobBuilder:
    def __init__(self, gateway_id: str, prefix_cache_secret: str, request_seconds: int) -> None:
        self._gateway_id = gateway_id
        self._prefix_cache_secret = prefix_cache_secret.encode()
        self._request_seconds = request_seconds

    def make(self, admitted: AdmittedRequest, *, waits_for_capacity: bool = True) -> InferenceJob:
        """Return the job of an execution.

        Args:
            waits_for_capacity: whether it waits for an upstream without capacity, since no other target follows.
        """
        demand, billing_context = admitted.demand, admitted.billing_context
        request, prompt = demand.request, demand.prompt
        cache_salt = self._cache_salt(billing_context.tenant_id, demand.model, request.cache_key)
        structured = None
        if prompt.upstream is None:
            structured = tools.spec(request, demand.model.tokenizer.tool_format if request.tools else None)
        return InferenceJob(
            billing_context=billing_context,
            gateway_id=self._gateway_id,
            prompt_token_ids=prompt.ids,
            params=build_sampling_params(admitted),
            cache_salt=cache_salt,
            deadline=demand.admitted_at / 1e6 + self._request_seconds,
            weight=demand.key.weight,
            service_class=request.service_class,
            priority=request.priority,
            breakpoints=prompt.breakpoints,
            input_lengths=prompt.input_lengths,
            second_starts=prompt.second_starts,
            searches=prompt.searches,
            structured=structured,
            reasoning=prompt.reasoning,
            version=demand.model.version,
            speculates=request.speculates,
            prediction=prompt.prediction,
            hides_output=request.hides_output,
            upstream=_upstream_request(demand, cache_salt, waits_for_capacity),
            credential=_credential(demand),
            is_tenant_credential=_has_credential(demand) and demand.model.name in demand.key.credentials,
        )

    def _cache_salt(self, tenant_id: int, model: ServedModel, cache_key: str | None) -> bytes:
        """Derive the cache salt from a secret, so that no tenant can hit or forge another tenant's cached prefixes.

        It depends on the weights, so that pinned prefixes of other weights are not billed as cache reads.
        """
        name = "\0".join((str(tenant_id), model.name, *model.weights, cache_key or "")).encode()
        return hmac.digest(self._prefix_cache_secret, name, "sha256")[:16]


def build_sampling_params(admitted: AdmittedRequest) -> SamplingParams:
    """Return the request's parameters, with the deployment's defaults for those that it does not set."""
    request = admitted.demand.request
    defaults = request.analysis.defaults_of(admitted.demand.model)
    return msgspec.structs.replace(request.sampling, max_tokens=admitted.max_tokens, **defaults)


def _credential(demand: AdmissionRequest) -> int | None:
    """Return the ID of the upstream credential: the tenant's own for the model, or else the deployment's."""
    upstream = demand.model.upstream
    if upstream is None or not _has_credential(demand):
        return None
    return demand.key.credentials.get(demand.model.name, upstream.credential)


def _has_credential(demand: AdmissionRequest) -> bool:
    """Return whether requests to the model may have a credential. A managed server has its worker's own key."""
    upstream = demand.model.upstream
    return upstream is not None and upstream.engine != UpstreamEngine.MANAGED


def _upstream_request(demand: AdmissionRequest, cache_salt: bytes, waits: bool) -> UpstreamRequest | None:
    """Return the request to the upstream, with the key that separates the tenants' prompt caches there."""
    request, upstream = demand.prompt.upstream, demand.model.upstream
    if request is None or upstream is None:
        return None
    body, name = request.body, preset_of(upstream).cache_key
    if name and request.operation == "chat":
        body = b'%s,"%s":"%s"}' % (body[:-1], name.encode(), cache_salt.hex().encode())
    return msgspec.structs.replace(request, body=body, waits_for_capacity=waits)
