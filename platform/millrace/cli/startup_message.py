"""The text that `millrace up` prints when the platform is ready: its URL, the accounts and an example request."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.conf.environment import PlatformSettings

CREDENTIALS = "credentials.json"
_TEXT = """
Millrace is ready at {url}

  console     {url}/
{accounts}
  logs        {logs}

Try it with curl:

export MILLRACE_API_KEY=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["demo_key"])' {path})
curl -s {url}/v1/chat/completions \\
  -H "Authorization: Bearer $MILLRACE_API_KEY" -H 'Content-Type: application/json' \\
  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Why is the sky blue?"}}], "max_tokens": 64}}'

or with Python (without packages; for the OpenAI SDK use base_url="{url}/v1" and the same key):

python3 - <<'EOF'
import json, os, urllib.request
body = {{"model": "{model}", "messages": [{{"role": "user", "content": "Why is the sky blue?"}}], "max_tokens": 64}}
headers = {{"Authorization": "Bearer " + os.environ["MILLRACE_API_KEY"], "Content-Type": "application/json"}}
request = urllib.request.Request("{url}/v1/chat/completions", json.dumps(body).encode(), headers)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
EOF

Press Ctrl-C to stop the platform. The data is kept."""
_SECRETS = """\
  operator    {operator_email}  {operator_password}
  tenant      {owner_email}  {owner_password}
  demo key    {demo_key}
  secrets     {path}  has them; they are not printed again"""
_NO_SECRETS = """\
  operator    {operator_email}
  tenant      {owner_email}
  secrets     {path} (operator_password, owner_password, demo_key)"""


def greeting(settings: PlatformSettings, credentials: Mapping[str, Any], logs: Path, *, show_secrets: bool) -> str:
    """Return the text for the accounts and the API key that `bootstrap` found or created.

    Args:
        show_secrets: whether to print the secrets. Use it only on a terminal and only for new secrets.
    """
    path = (settings.data_dir / CREDENTIALS).resolve()
    accounts = (_SECRETS if show_secrets else _NO_SECRETS).format(path=path, **credentials)
    return _TEXT.format(
        url=settings.base_url,
        model=settings.models[0].name,
        logs=logs,
        accounts=accounts,
        path=shlex.quote(str(path)),
    )
