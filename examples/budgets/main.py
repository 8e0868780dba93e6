"""Give each team a project, an API key and a daily budget. The script can be repeated."""

from __future__ import annotations

import os

from millrace.client import Client

NANO_A_DOLLAR = 10**9
TEAMS = {"Search": 2 * NANO_A_DOLLAR, "Support": 5 * NANO_A_DOLLAR}  # a day


def main() -> None:
    """Run the example."""
    url = os.environ.get("MILLRACE_URL", "http://127.0.0.1:8000")
    with Client(url, os.environ["MILLRACE_API_KEY"]) as client:
        for team, amount in TEAMS.items():
            slug = team.lower()
            project = next(iter(client.projects.list(slug=slug)), None) or client.projects.create(name=team, slug=slug)
            if not any(key["name"] == slug for key in client.keys.list(live=True, project=project["id"])):
                key = client.keys.create(name=slug, project_id=project["id"], scopes=["inference"])
                print(f"{team}: new key {key['prefix']}…")  # store key["secret"] now: it is shown only once
            budgets = client.budgets.list(active=True, project=project["id"])
            budget = next((row for row in budgets if row["name"] == slug), None)
            if budget is None:
                client.budgets.create(name=slug, project_id=project["id"], unit="money", period="day", amount=amount)
            elif budget["amount"] != amount:
                client.budgets.update(budget["id"], amount=amount)
            print(f"{team}: ${amount / NANO_A_DOLLAR:.2f} a day")


if __name__ == "__main__":
    main()
