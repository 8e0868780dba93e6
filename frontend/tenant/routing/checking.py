"""What is said of a policy while it is written, and its publication."""

from __future__ import annotations

from dataclasses import dataclass

from frontend.core.page_context import PageContext
from frontend.tenant.routing import dry_runs, page, places
from frontend.tenant.routing.dry_runs import Trial
from frontend.tenant.routing.page import RoutingChanged, RoutingPanel
from frontend.tenant.routing.places import Fault
from millrace.conf.environment import platform_settings
from tenants import actions
from tenants.actions import Conflict
from tenants.isolation.scopes import tenant_scope
from tenants.models import RoutingPolicy


@dataclass(frozen=True)
class Checked:
    """Either what is wrong, or what it means and would have done."""

    fault: Fault | None
    shown: RoutingPanel | None
    trial: Trial | None
    against: int | None  # the active version, that `diff` is to
    diff: tuple[RoutingChanged, ...]
    unserved: tuple[str, ...]  # models it names that this platform does not serve


def served() -> tuple[str, ...]:
    """Return the names of the platform's models."""
    return tuple(spec.name for spec in platform_settings().models)


def check(visit: PageContext, name: str, text: str) -> Checked:
    """In the visit's scope."""
    found = places.read(text)
    if isinstance(found, Fault):
        return Checked(found, None, None, None, (), ())
    body, policy = found
    active = page.versions(visit).filter(name=name, active=True).first() if name else None
    return Checked(
        fault=None,
        shown=page.in_words(visit, policy),
        trial=dry_runs.try_on(visit, policy, name),
        against=None if active is None else active.version,
        diff=() if active is None else page.diff(places.pretty(active.body), places.pretty(body)),
        unserved=tuple(sorted(set(policy.models) - set(served()))),
    )


def publish(visit: PageContext, *, name: str, body: str, base: int | None) -> RoutingPolicy:
    """Activate it, unless another version became active since `base` was read.

    Raises:
        ActionRefused: it is no policy, or is not what one believed to change.
    """
    found = places.read(body)
    if isinstance(found, Fault):
        raise actions.ActionRefused(f"Line {found.line}: {found.said}")
    with tenant_scope(visit.tenant):
        # NOTE: the publication locks the tenant's row; what is read after it is what was active before it.
        made = actions.do_publish_policy(visit.tenant, name, found[0], created_by=visit.user)
        rows = RoutingPolicy.objects.for_tenant(visit.tenant).filter(name=name, version__lt=made.version)
        before = rows.order_by("-version").first()
        was = None if before is None else before.version
        if base is not None and was is not None and was > base:
            raise Conflict(f"Version {was} was published while you were editing. Start from that version.")
    return made
