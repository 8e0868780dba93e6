"""Links in emails and redirects to other sites have the host of MILLRACE_PUBLIC_URL, not that of a request."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
HOST = re.compile(r"build_absolute_uri|get_host\(|HTTP_HOST|get_current_site|x-forwarded-host", re.IGNORECASE)
# These return links to the client that sent the host, or compare the host.
ALLOWED = {"tenants/site_urls.py", "platform/millrace/apps/request_log/api.py"}


def test_the_host_of_a_request_is_in_no_link() -> None:
    found = {
        str(path.relative_to(ROOT))
        for package in ("frontend", "tenants", "billing", "platform")
        for kind in ("*.py", "*.html", "*.txt")
        for path in (ROOT / package).rglob(kind)
        if HOST.search(path.read_text(encoding="utf-8"))
    }
    assert found == ALLOWED
