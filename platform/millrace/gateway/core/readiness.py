"""The result of a gateway's readiness checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

OK = "ok"
STALE = "stale"  # PostgreSQL does not answer, and cached keys are valid for MILLRACE_STALE_KEY_SECONDS


@dataclass(frozen=True)
class Readiness:
    """Each check of a gateway with `ok`, `stale` or a description of its problem.

    All gateways see the same replicas. So a model without a replica makes no gateway unready, unless that is asked for:
    a load balancer would remove all of them, and the console with them.
    """

    own: Mapping[str, str]  # what this gateway needs itself
    models: Mapping[str, str]  # the models that a ready platform serves

    @property
    def checks(self) -> dict[str, str]:
        return {**self.own, **self.models}

    def is_ready(self, *, with_models: bool = False) -> bool:
        """Return whether the gateway's own checks have passed, and with `with_models` also those of the models."""
        return all(state in (OK, STALE) for state in (self.checks if with_models else self.own).values())
