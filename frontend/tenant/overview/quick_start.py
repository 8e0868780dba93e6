"""The quick start of a tenant without requests, and the checklist of its first steps."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from django.utils.translation import gettext as _

from billing.metering.usage import UsageReport
from billing.models import Budget
from frontend.core.page_context import PageContext
from tenants.models import ApiKey, Invitation, Membership
from tenants.permissions import Permission

DISMISSED_COOKIE = "checklist"


@dataclass(frozen=True)
class CodeExample:
    """A first request in one language."""

    name: str
    language: str
    text: str


@dataclass(frozen=True)
class ChecklistStep:
    """A first step. `place` is where its link opens: "dialog", or empty for a page."""

    label: str
    detail: str
    done: bool
    action: str
    url: str
    place: str = ""


def code_examples(base_url: str, model: str) -> tuple[CodeExample, ...]:
    """Return the same first request in four languages. `base_url` is without `/v1`."""
    python = f"""import os

from openai import OpenAI

client = OpenAI(base_url="{base_url}/v1", api_key=os.environ["MILLRACE_API_KEY"])
answer = client.chat.completions.create(
    model="{model}",
    messages=[{{"role": "user", "content": "Hello!"}}],
)
print(answer.choices[0].message.content)"""
    node = f"""import OpenAI from "openai";

const client = new OpenAI({{ baseURL: "{base_url}/v1", apiKey: process.env.MILLRACE_API_KEY }});
const answer = await client.chat.completions.create({{
  model: "{model}",
  messages: [{{ role: "user", content: "Hello!" }}],
}});
console.log(answer.choices[0].message.content);"""
    curl = f"""curl {base_url}/v1/chat/completions \\
  -H "Authorization: Bearer $MILLRACE_API_KEY" \\
  -H "Content-Type: application/json" \\
  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'"""
    anthropic = f"""import os

from anthropic import Anthropic

client = Anthropic(base_url="{base_url}", api_key=os.environ["MILLRACE_API_KEY"])
answer = client.messages.create(
    model="{model}",
    max_tokens=256,
    messages=[{{"role": "user", "content": "Hello!"}}],
)
print(answer.content[0].text)"""
    return (
        CodeExample("python", "Python", python),
        CodeExample("node", "Node", node),
        CodeExample("curl", "curl", curl),
        CodeExample("anthropic", "Anthropic SDK", anthropic),
    )


def has_checklist(ctx: PageContext) -> bool:
    """Return whether the checklist is shown: to users who may take its steps, until they dismiss it."""
    return ctx.may(Permission.KEYS_WRITE) and ctx.request.COOKIES.get(DISMISSED_COOKIE) != "off"


def checklist(ctx: PageContext) -> dict[str, object]:
    """Return the first steps with their state; no steps if all of them are done. Call inside `ctx.scope()`."""
    steps = _steps(ctx) if has_checklist(ctx) else ()
    done = sum(step.done for step in steps)
    return {"steps": () if done == len(steps) else steps, "done": done}


def _steps(ctx: PageContext) -> tuple[ChecklistStep, ...]:
    tenant = ctx.tenant
    has_key = ApiKey.objects.for_tenant(tenant).exists()
    has_budget = Budget.objects.for_tenant(tenant).filter(active=True).exists()
    has_colleague = Membership.objects.for_tenant(tenant)[1:2].exists() or _invitations(ctx)
    steps = [
        ChecklistStep(
            _("Create an API key"),
            _("It authenticates requests to the API."),
            has_key,
            _("Create key"),
            ctx.url("keys-new"),
            "dialog",
        ),
        ChecklistStep(
            _("Send a request"),
            _("From your code or in the playground. It appears here within seconds."),
            UsageReport(tenant.pk).events().exists(),
            _("Open playground"),
            ctx.url("playground"),
        ),
    ]
    if ctx.may(Permission.LIMITS_WRITE):
        steps.append(
            ChecklistStep(
                _("Set a budget"),
                _("Requests over a hard limit are rejected."),
                has_budget,
                _("Create budget"),
                ctx.url("budgets-new"),
            )
        )
    if ctx.may(Permission.MEMBERS_WRITE):
        steps.append(
            ChecklistStep(
                _("Invite a colleague"),
                _("Roles decide what members can view and change."),
                has_colleague,
                _("Invite"),
                ctx.url("members-invite"),
                "dialog",
            )
        )
    return tuple(steps)


def _invitations(ctx: PageContext) -> bool:
    """Return whether an invitation is open."""
    rows = Invitation.objects.for_tenant(ctx.tenant).filter(accepted_at=None, revoked_at=None)
    return bool(rows.filter(expires_at__gt=datetime.now(UTC)).exists())
