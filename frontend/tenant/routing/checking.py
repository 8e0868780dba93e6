"""Check of a routing policy while it is edited, and its publication."""

from __future__ import annotations

from dataclasses import dataclass

from frontend.core.page_context import PageContext
from frontend.tenant.routing import dry_runs, page, positions
from frontend.tenant.routing.dry_runs import RoutingDryRun
from frontend.tenant.routing.page import DiffLine, RoutingPanel
from frontend.tenant.routing.positions import PolicyError
from millrace.apps.operations.deployments import served_specs
from tenants import actions
from tenants.actions import Conflict
from tenants.isolation.scopes import tenant_scope
from tenants.models import RoutingPolicy


@dataclass(frozen=True)
class CheckResult:
    """Either the error of a policy, or its meaning and its dry run."""

    error: PolicyError | None
    shown: RoutingPanel | None
    trial: RoutingDryRun | None
    against: int | None  # the active version, which `diff` compares with
    diff: list[DiffLine]
    unserved: tuple[str, ...]  # named models that the platform does not serve


def served() -> tuple[str, ...]:
    """Return the names of the platform's models."""
    return tuple(spec.name for spec in served_specs())


def check(ctx: PageContext, name: str, text: str) -> CheckResult:
    """Check the text of a policy. Call inside `ctx.scope()`."""
    found = positions.read(text)
    if isinstance(found, PolicyError):
        return CheckResult(found, None, None, None, [], ())
    body, policy = found
    active = page.versions(ctx).filter(name=name, active=True).first() if name else None
    return CheckResult(
        error=None,
        shown=page.in_words(ctx, policy),
        trial=dry_runs.dry_run(ctx, policy, name),
        against=None if active is None else active.version,
        diff=[] if active is None else page.diff(positions.pretty(active.body), positions.pretty(body)),
        unserved=tuple(sorted(set(policy.models) - set(served()))),
    )


def publish(ctx: PageContext, *, name: str, body: str, base: int | None) -> RoutingPolicy:
    """Publish a policy, unless another version became active since `base` was read.

    Raises:
        ActionRefused: the text is not a policy, or another version is active.
    """
    found = positions.read(body)
    if isinstance(found, PolicyError):
        raise actions.ActionRefused(f"Line {found.line}: {found.message}")
    with tenant_scope(ctx.tenant):
        # NOTE: the publication locks the tenant's row, so the version read after it was active before it.
        made = actions.do_publish_policy(ctx.tenant, name, found[0], created_by=ctx.user)
        rows = RoutingPolicy.objects.for_tenant(ctx.tenant).filter(name=name, version__lt=made.version)
        before = rows.order_by("-version").first()
        was = None if before is None else before.version
        if base is not None and was is not None and was > base:
            raise Conflict(f"Version {was} was published while you were editing. Start from that version.")
    return made
