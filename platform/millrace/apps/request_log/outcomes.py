"""Labeled outcomes of a tenant's requests, to train the complexity classifier: prompts with feedback.

Only requests with feedback that reports success or a score are outcomes, and only if their prompt is stored. Each has
the success of the one model that answered it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Q

from millrace.apps.feedback.models import SubmittedFeedback
from millrace.apps.request_log.models import RequestRecord
from millrace.apps.request_log.request_rollups import GOOD_SCORE
from millrace.apps.request_log.stored_prompts import decode_body, read_bodies
from tenants.routing_policies.complexity import MAX_TEXT

MAX_OUTCOMES = 1000


@dataclass(frozen=True)
class LabeledOutcome:
    """The start of a last user message, and whether the model's answer was good."""

    prompt: str
    weak_ok: bool | None
    strong_ok: bool | None


def labeled_outcomes(
    tenant_id: int, name: str, weak: str, strong: str, start: datetime, end: datetime
) -> list[LabeledOutcome]:
    """Return the newest outcomes of requests for a model name. The tenant's scope must be open.

    Args:
        weak, strong: the models that answered; requests that others answered are left out.
    """
    records = RequestRecord.objects.for_tenant(tenant_id).filter(
        requested_model=name,
        served_model__in=(weak, strong),
        started_at__gte=start,
        started_at__lt=end,
        outcome="completed",
    )
    feedback = SubmittedFeedback.objects.for_tenant(tenant_id).filter(Q(success__isnull=False) | Q(score__isnull=False))
    rows = records.filter(request_id__in=feedback.values("request_id")).order_by("-started_at")
    models = dict(rows.values_list("request_id", "served_model")[:MAX_OUTCOMES])
    labels = feedback.filter(request_id__in=models).values_list("request_id", "success", "score")
    good = {
        request_id: (score or 0) >= GOOD_SCORE if success is None else success for request_id, success, score in labels
    }
    prompts = {request_id: question_in(text) for request_id, text in read_bodies(tenant_id, list(models))}
    return [
        LabeledOutcome(
            prompts[request_id],
            good[request_id] if model == weak else None,
            good[request_id] if model == strong else None,
        )
        for request_id, model in models.items()
        if prompts.get(request_id)
    ]


def question_in(body: str) -> str:
    """Return the start of the last user message in a stored request body; empty if it has none."""
    fields = decode_body(body) or {}
    prompt = next((fields[name] for name in ("messages", "input", "prompt") if fields.get(name)), "")
    if isinstance(prompt, str):
        return prompt[:MAX_TEXT]
    messages = prompt if isinstance(prompt, list) else []
    user = next((item for item in reversed(messages) if isinstance(item, dict) and item.get("role") == "user"), {})
    return _text(user.get("content"))[:MAX_TEXT]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))
