"""Give each team a project, an API key and a daily budget. The script can be repeated."""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any

URL = os.environ.get("MILLRACE_URL", "http://127.0.0.1:8000")
NANO_A_DOLLAR = 10**9
TEAMS = {"Search": 2 * NANO_A_DOLLAR, "Support": 5 * NANO_A_DOLLAR}  # a day


def call(method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Call the management API. The key needs the scope `manage`."""
    headers = {"authorization": f"Bearer {os.environ['MILLRACE_API_KEY']}", "content-type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, headers, method=method)  # noqa: S310 - the URL is your own
    with urllib.request.urlopen(request) as response:  # noqa: S310
        return json.load(response)


def find(path: str, **values: object) -> dict[str, Any] | None:
    """Return the object of a list that has these values."""
    while path:
        page = call("GET", path)
        for found in page["results"]:
            if all(found[name] == value for name, value in values.items()):
                return found
        path = (page["next"] or "").removeprefix(URL)
    return None


def main() -> None:
    """Run the example."""
    for team, amount in TEAMS.items():
        slug = team.lower()
        project = find("/api/projects", slug=slug) or call("POST", "/api/projects", {"name": team, "slug": slug})
        if find("/api/keys?live=true", project_id=project["id"], name=slug) is None:
            key = call("POST", "/api/keys", {"name": slug, "project_id": project["id"], "scopes": ["inference"]})
            print(f"{team}: new key {key['prefix']}…")  # store key["secret"] now: it is shown only once
        budget = find("/api/budgets", project_id=project["id"], name=slug, active=True)
        if budget is None:
            body = {"name": slug, "project_id": project["id"], "unit": "money", "period": "day", "amount": amount}
            budget = call("POST", "/api/budgets", body)
        elif budget["amount"] != amount:
            budget = call("PATCH", f"/api/budgets/{budget['id']}", {"amount": amount})
        print(f"{team}: ${budget['amount'] / NANO_A_DOLLAR:.2f} a day")


if __name__ == "__main__":
    main()
