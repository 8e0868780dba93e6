"""The identity of an answer: everything that two requests must have in common to share it.

Both caches start with the partition: the tenant, the project if the tenant chose so, the deployment, the version of the
policy and the upstream credential. The ID of the credential counts, and for a tenant's own credential also its version,
but never its secret. So an answer that one credential has paid for is not served for another one.
"""

from __future__ import annotations

import dataclasses

import msgspec

from inference_worker.contract.messages import InferenceJob
from inference_worker.contract.request import SamplingParams, StructuredSpec
from millrace.gateway.dispatch.execution import Execution


def exact_parts(execution: Execution) -> tuple[object, ...]:
    """Return the identity of the answer to an equal request: everything of the job that the answer depends on.

    Of a conversation that is summarized, the whole prompt counts, so that a hit needs no summary.
    """
    job = execution.job
    upstream = None if job.upstream is None else (job.upstream.operation, job.upstream.body)
    asked = job.prompt_token_ids if execution.whole_prompt is None else ("summarized", execution.whole_prompt)
    prompt = (asked, upstream, _format(job), job.reasoning)
    return (*_partition(execution), prompt, _without_seed(job.params))


def similar_parts(execution: Execution, context: bytes, embedding: str) -> tuple[object, ...]:
    """Return the identity of what must be equal for two questions to be similar: all but the last turn of the user."""
    job, request = execution.job, execution.admitted.demand.request
    params = _without_seed(msgspec.structs.replace(job.params, max_tokens=request.max_tokens or 0))
    return (*_partition(execution), context, params, _format(job), embedding)


def _partition(execution: Execution) -> tuple[object, ...]:
    """Return what all requests that share answers have in common.

    The cache salt is derived from the tenant, the weights and the request's `prompt_cache_key`.
    """
    job, key = execution.job, execution.admitted.demand.key
    project = key.project_id if key.answer_cache_scope == "project" else None
    policy = execution.decision_record.policy_version
    version = key.credential_versions.get(job.billing_context.model) if job.is_tenant_credential else None
    return job.cache_salt, job.deployment_key, policy, project, job.credential, version


def _format(job: InferenceJob) -> StructuredSpec | None:
    """Return the format of the answer, without the parameter's name, which depends on the dialect."""
    return None if job.structured is None else dataclasses.replace(job.structured, param="")


def _without_seed(params: SamplingParams) -> SamplingParams:
    """Return the parameters without a seed that has no effect."""
    return params if params.temperature else msgspec.structs.replace(params, seed=None)
