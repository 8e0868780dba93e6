"""What `millrace up` prints when all is ready: where it is, how to log in, and a request to copy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.config import PlatformSettings

_TEXT = """
Millrace is ready at {url}

  console     {url}/
  operator    {operator_email}  {operator_password}
  tenant      {owner_email}  {owner_password}
  demo key    {demo_key}
  logs        {logs}

Try it with curl:

curl -s {url}/v1/chat/completions \\
  -H 'Authorization: Bearer {demo_key}' -H 'Content-Type: application/json' \\
  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Why is the sky blue?"}}], "max_tokens": 64}}'

or with Python (needs nothing but Python; the OpenAI SDK takes base_url="{url}/v1" and the same key):

python3 - <<'EOF'
import json, urllib.request
body = {{"model": "{model}", "messages": [{{"role": "user", "content": "Why is the sky blue?"}}], "max_tokens": 64}}
headers = {{"Authorization": "Bearer {demo_key}", "Content-Type": "application/json"}}
request = urllib.request.Request("{url}/v1/chat/completions", json.dumps(body).encode(), headers)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
EOF

Ctrl-C stops everything; the data stays."""


def greeting(settings: PlatformSettings, found: Mapping[str, Any], logs: Path) -> str:
    """The text, for the log-ins and the key that `bootstrap` found or made."""
    return _TEXT.format(url=settings.base_url, model=settings.models[0].name, logs=logs, **found)
