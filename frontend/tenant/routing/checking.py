"""Check of a routing policy while it is edited, and its publication."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _

from frontend.core.numbers import Money, common_places, percent
from frontend.core.page_context import PageContext
from frontend.tenant.routing import page, positions
from frontend.tenant.routing.positions import PolicyError
from millrace.apps.policy_results.policy_dry_runs import PolicyDryRun, dry_run
from tenants import actions
from tenants.isolation.scopes import tenant_scope
from tenants.models import RoutingPolicy, RoutingPolicyDraft
from tenants.routing_policies.diffs import DiffLine, diff, pretty
from tenants.routing_policies.target_checks import TargetChecks, TargetProblem
from tenants.stored_text import unstorable_fields

ALL_MODELS = "*"  # a choice of the dry run


@dataclass(frozen=True)
class CheckResult:
    """Either the error of a policy, or its dry run."""

    error: PolicyError | None
    trial: PolicyDryRun | None
    of_all: bool  # the dry run is of requests of all models
    active: RoutingPolicy | None  # the policy that `diff` compares with
    diff: list[DiffLine]
    places: list[TargetProblem]  # problems of named models, one for each place

    @property
    def problems(self) -> list[TargetProblem]:
        """Return the problems of named models, one for each model."""
        return _by_model(self.places)

    @property
    def is_blocked(self) -> bool:
        """Return whether the policy cannot be published."""
        return any(problem.is_blocking for problem in self.places)

    @property
    def rejected(self) -> int:
        """Return the number of requests of the dry run that would be rejected."""
        return 0 if self.trial is None else self.trial.rejected.total()

    @property
    def cost_places(self) -> int:
        """The decimals of the costs before and after."""
        trial = self.trial
        return common_places(() if trial is None else (Money(trial.cost_femto), Money(trial.new_cost_femto)))

    @property
    def success_rates(self) -> tuple[str, str] | None:
        """Return the expected success rates before and after."""
        trial = self.trial
        if trial is None or trial.success_rate is None or trial.new_success_rate is None:
            return None
        return percent(trial.success_rate), percent(trial.new_success_rate)


def target_checks(ctx: PageContext) -> TargetChecks:
    """Return the checks of models that a page shares, with those of their replicas."""
    return TargetChecks(ctx.tenant.pk, with_replicas=True)


def check(ctx: PageContext, name: str, text: str, targets: TargetChecks | None = None) -> CheckResult:
    """Check the text of a policy. Call inside `ctx.scope()`.

    Args:
        targets: checks that may know the policy's models.
    """
    of_all = ctx.request.POST.get("of", ctx.query.get("of", "")) == ALL_MODELS
    found = positions.read(text)
    if isinstance(found, PolicyError):
        return CheckResult(found, None, of_all, _active(ctx, name), [], [])
    body, policy = found
    active = _active(ctx, name)
    targets = targets or target_checks(ctx)
    places = targets.of_policy(body)
    obstacles = targets.obstacles_of(policy.models)
    return CheckResult(
        error=None,
        trial=dry_run(ctx.tenant.pk, policy, None if of_all else name, obstacles=obstacles),
        of_all=of_all,
        active=active,
        diff=[] if active is None else diff(pretty(active.body), pretty(body)),
        places=places,
    )


def problems_of(ctx: PageContext, body: Mapping[str, Any]) -> list[TargetProblem]:
    """Return the problems of a policy's models, one for each model. Call inside `ctx.scope()`."""
    return _by_model(target_checks(ctx).of_policy(body))


def _by_model(problems: list[TargetProblem]) -> list[TargetProblem]:
    return list({problem.model: problem for problem in reversed(problems)}.values())[::-1]


def _active(ctx: PageContext, name: str) -> RoutingPolicy | None:
    return page.versions(ctx).filter(name=name, active=True).first() if name else None


def publish(ctx: PageContext, *, name: str, body: str, base: int | None) -> RoutingPolicy:
    """Publish a policy, and delete its draft. `base` is the active version that the change is based on, 0 if none.

    Raises:
        ActionRefused: the text is not a policy, or a model in it cannot serve requests.
        VersionConflict: another version than the base is active.
    """
    found = positions.read(body)
    if isinstance(found, PolicyError):
        raise actions.ActionRefused(_("Line %(line)s: %(message)s") % {"line": found.line, "message": found.message})
    with tenant_scope(ctx.tenant):
        made = actions.do_publish_policy(ctx.tenant, name, found[0], created_by=ctx.user, base_version=base)
        if draft := RoutingPolicyDraft.objects.for_tenant(ctx.tenant).filter(name=name).first():
            actions.do_discard_policy_draft(draft)
    return made


def save_draft(ctx: PageContext, *, name: str, body: str, base: int | None) -> RoutingPolicyDraft:
    """Save the draft of a policy, which may be invalid. `base` is the active version that it is based on, 0 if none.

    Raises:
        ActionRefused: the text is not a JSON object.
    """
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise actions.ActionRefused(_("A draft must be JSON.")) from exc
    if not isinstance(parsed, dict):
        raise actions.ActionRefused(_("A draft must be a JSON object."))
    if any(unstorable_fields(parsed)):
        raise actions.ActionRefused(_("Remove the character NUL and lone surrogates."))
    return actions.do_save_policy_draft(ctx.tenant, name, parsed, updated_by=ctx.user, base_version=base)
