"""The text that `millrace up` prints when the platform is ready: its URL, the accounts and an example request."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inference_worker.contract.command_line import format_command
from inference_worker.contract.compute_support import SlowReason
from millrace.environment.configuration import PlatformSettings

CREDENTIALS = "credentials.json"
_TEXT = """
Millrace is ready at {url}

  console     {url}/
{accounts}
  logs        {logs}
  commands    {program} --help
{slow}{gpu_advice}
{key}
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
_GPU_ADVICE = """
This machine has {gpus}. The built-in engine has not run on a GPU yet.
Use vLLM or SGLang for your models. The platform starts and supervises them as managed engines:

export MILLRACE_MANAGED_PROGRAMS=vllm  # before the start of the platform
{login}
{add} my-model --engine managed --preset vllm --model DIRECTORY --max-model-len 16384 \\
  --command '{server}'
"""
_SERVER = "VLLM_API_KEY={api_key} vllm serve {model} --host {host} --port {port} --max-model-len {context_length}"
_DEMO_KEY = """\
Try it with curl:

export MILLRACE_API_KEY=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["demo_key"])' {path})"""
_OWN_KEY = """\
Create an API key in the console, then try it with curl:

export MILLRACE_API_KEY=sk-mr-…"""
_SECRETS = ("operator_password", "owner_password", "demo_key")


def greeting(
    settings: PlatformSettings,
    credentials: Mapping[str, Any],
    logs: Path,
    *,
    show_secrets: bool,
    gpus: Sequence[str] = (),
    slow: Mapping[str, SlowReason] | None = None,
) -> str:
    """Return the text for the accounts and the API key that `bootstrap` created, or that still exist.

    Args:
        gpus: names of the machine's GPUs. With one, the text names managed engines before the first request.
        slow: models with a slower backend than the machine's default.
        show_secrets: whether to print the secrets. Use it only on a terminal and only for new secrets.
    """
    path = (settings.data_dir / CREDENTIALS).resolve()
    return _TEXT.format(
        url=settings.base_url,
        model=settings.models[0].name,
        logs=logs,
        accounts=_accounts(credentials, path, show_secrets=show_secrets),
        key=_DEMO_KEY.format(path=shlex.quote(str(path))) if "demo_key" in credentials else _OWN_KEY,
        program=format_command(),
        gpu_advice=_advise_gpu(settings, gpus) if gpus else "",
        slow="".join(
            f"\n{model} is slow: {reason.cause}.\n{reason.instruction}\n" for model, reason in (slow or {}).items()
        ),
    )


def _accounts(credentials: Mapping[str, Any], path: Path, *, show_secrets: bool) -> str:
    names = [name for name in _SECRETS if name in credentials]
    rows = []
    for title, who in (("operator", "operator"), ("tenant", "owner")):
        if f"{who}_email" in credentials:
            password = f"  {credentials[f'{who}_password']}" if show_secrets else ""
            rows.append((title, f"{credentials[f'{who}_email']}{password}"))
    if show_secrets and "demo_key" in credentials:
        rows.append(("demo key", credentials["demo_key"]))
    if names:
        contents = "  has them; they are not printed again" if show_secrets else f" ({', '.join(names)})"
        rows.append(("secrets", f"{path}{contents}"))
    if "operator_email" not in credentials:
        rows.append(("operator", f"if the password is lost: {format_command('manage reset_password EMAIL')}"))
    return "\n".join(f"  {title:<10}  {text}" for title, text in rows)


def _advise_gpu(settings: PlatformSettings, gpus: Sequence[str]) -> str:
    names = ", ".join(f"{count} × {name}" if count > 1 else name for name, count in Counter(gpus).items())
    login = format_command(f"login --operator --url {settings.base_url}")
    return _GPU_ADVICE.format(gpus=names, server=_SERVER, login=login, add=format_command("deployments add"))
