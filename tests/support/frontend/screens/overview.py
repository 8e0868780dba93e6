"""Screen of the tenant's overview."""

from __future__ import annotations

from billing.budgets.budgets import do_make_budget
from tests.support.frontend.console import Screen, World, register


def prepare(world: World) -> None:
    for state, amount in (("populated", 200 * 10**9), ("over", 20 * 10**9)):
        do_make_budget(world.tenants[state], name="All of it", unit="money", period="month", amount=amount)


register(
    Screen("overview", "/t/{slug}/", queries=54),
    Screen("search", "/t/{slug}/search", queries=12, states=("populated",)),
    Screen("shortcuts", "/t/{slug}/shortcuts", queries=10, states=("populated",)),
    prepare=prepare,
    theirs={"panel": lambda world: "none-such"},
)
