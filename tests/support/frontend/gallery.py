"""The list of all screenshots on the page docs/reference/screens.md of the site."""

from __future__ import annotations

from collections.abc import Collection

TITLES = {
    "overview-empty": "Overview before the first request",
    "overview-over": "Overview over budget",
    "budgets-typed": "New budget with a replay",
    "invoices-upcoming": "Draft of an invoice",
    "operator-deployments-new": "Add deployment",
    "operator-deployments-new-path": "Add deployment of a path",
    "operator-deployments-new-openai": "Add deployment of an upstream",
    "requests-refused": "Request rejected by a limit",
    "requests-refused-budget": "Request rejected by a budget",
    "login": "Sign-in",
}


def gallery(names: Collection[str]) -> str:
    """Return the list of the screenshots of these pages, in the order of the sidebar."""
    from frontend.core.screens import OPERATOR, TENANT, sidebar_screens

    order = [screen.route for package in (TENANT, OPERATOR) for screen in sidebar_screens(package)]

    def place(name: str) -> tuple[int, str]:
        """Sort the pages of a screen after it, and those without a screen at the end."""
        owner = max((route for route in order if name == route or name.startswith(f"{route}-")), key=len, default="")
        return (order.index(owner) if owner else len(order), name)

    parts: list[str] = []
    for heading, is_operator in (("Organization", False), ("Operator", True)):
        parts.append(f"\n## {heading}\n")
        for name in sorted((name for name in names if name.startswith("operator-") == is_operator), key=place):
            title = TITLES.get(name) or name.removeprefix("operator-").replace("-", " ").capitalize()
            pictures = (f"![{title}, {theme}](../screenshots/{name}-{theme}-1440.webp)" for theme in ("light", "dark"))
            parts.append(f"\n### {title}\n\n| light | dark |\n|---|---|\n| {' | '.join(pictures)} |\n")
            parts.append(f"\n[{title} on a phone](../screenshots/{name}-light-390.webp)\n")
    return "".join(parts)
