"""The costs of requests to the console and the management API, in units of a simple request.

The limits are in `millrace.conf.request_costs`, which reads the cost of a view.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

V = TypeVar("V", bound=Callable[..., Any])

SIMPLE_COST, PAGE_COST, REPORT_COST, HEAVY_COST = 1, 2, 10, 30


def with_cost(cost: int, view: V) -> V:
    """Return the view with the cost of its requests as attribute."""
    view.request_cost = cost  # type: ignore[attr-defined]
    return view
