"""`millrace deployments`: the models that the platform serves."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from inference_worker.contract.command_line import format_command
from millrace.cli import output
from millrace.cli.app import FAILED, USAGE, ResourceGroup, Session, command, fail, given_options
from millrace.cli.credentials import read_secret
from millrace.cli.output import Column, moment, yes_no
from millrace.cli.profiles import config_path, find_connection

ENGINES = click.Choice(["millrace", "openai", "anthropic", "managed"])
MAX_FILE_BYTES = 1 << 20
WAIT_SECONDS = 600.0
POLL_SECONDS = 1.0
_WAIT_STATES = {"load": ("ready", "scaled_to_zero"), "unload": ("unloaded",), "drain": ("drained", "unloaded")}


def _replicas(row: Mapping[str, Any]) -> str:
    wanted = row["wanted_replicas"]
    return f"{row['ready_replicas']} of {'all workers' if wanted is None else wanted}"


def _state(row: Mapping[str, Any]) -> str:
    percent = row["progress_percent"]
    return str(row["state"]) if percent is None else f"{row['state']} {percent}%"


_DEPLOYMENT = [
    Column("name", "name"),
    Column("state", _state),
    Column("replicas", _replicas, right=True),
    Column("source", "source"),
    Column("revision", "revision"),
    Column("dtype", "dtype"),
    Column("price", "has_price", yes_no),
]
_DETAILS = [
    *_DEPLOYMENT,
    Column("reason", "reason"),
    Column("version", "version"),
    Column("quantization", "quantization"),
    Column("KV cache dtype", "kv_cache_dtype"),
    Column("max_model_len", "max_model_len"),
    Column("KV cache memory", "kv_cache_memory"),
    Column("block size", "block_size"),
    Column("speculation", "speculation"),
    Column("draft model", "draft_model"),
    Column("tool parser", "tool_parser"),
    Column("reasoning parser", "reasoning_parser"),
    Column("control tokens", "control_tokens"),
    Column("default max_tokens", "default_max_tokens"),
    Column("sampling defaults", "sampling_defaults"),
    Column("truncate inputs", "truncate_inputs", yes_no),
    Column("pools", lambda row: ", ".join(f"{pool}={count or 'all'}" for pool, count in row["pools"].items())),
    Column("idle seconds", "idle_seconds"),
    Column("engine", "engine"),
    Column("upstream model", "upstream_model"),
    Column("preset", "preset"),
    Column("credential", "credential_id"),
    Column("concurrency", "concurrency"),
]
_REPLICA = [
    Column("replica", "id"),
    Column("machine", "host"),
    Column("since", "started_at", moment),
    Column("state", "state"),
    Column("version", "version"),
    Column("running", "running", right=True),
    Column("waiting", "waiting", right=True),
    Column("load ms", "load_ms", right=True),
    Column("reason", "reason"),
]


@click.group(cls=ResourceGroup)
def deployments() -> None:
    """Manage the models that the platform serves (operators)."""


def _options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a deployment to a command."""
    decorated: Any = function
    for option in reversed(
        (
            click.option("--revision", help="Revision of the source. A new one is loaded beside the old one."),
            click.option("--dtype", help="auto, bfloat16, float16 or float32."),
            click.option("--quantization", help="Quantization of the weights when they are loaded."),
            click.option("--kv-cache-dtype", help="Of the stored keys and values: auto, int8 or fp8."),
            click.option("--max-model-len", type=int, help="Maximum tokens of prompt and completion together."),
            click.option("--kv-cache-memory", metavar="SIZE", help="KV cache: a size such as 2GiB, or a share."),
            click.option("--block-size", type=int, help="Tokens of a KV cache block."),
            click.option("--speculation", help="Speculative decoding: auto or off."),
            click.option("--draft-model", metavar="SOURCE", help="Draft model: a source, or self:int8."),
            click.option("--tool-parser", metavar="NAME", help="Format of tool calls."),
            click.option("--reasoning-parser", metavar="NAME", help="Format of reasoning."),
            click.option("--sampling-defaults", help="auto: the checkpoint's; none; or temperature=0.6,top_p=0.95."),
            click.option(
                "--truncate-inputs/--no-truncate-inputs",
                default=None,
                help="Truncate inputs above an encoder's length, or refuse them.",
            ),
            click.option("--control-tokens", help="Where texts become control tokens: template or anywhere."),
            click.option("--default-max-tokens", type=int, help="Limit of responses whose request sets none."),
            click.option(
                "--pool", "pools", multiple=True, metavar="POOL=REPLICAS", help="Worker pool; 0: on each worker."
            ),
            click.option("--idle-seconds", type=int, help="Unload after this time without requests; 0: never."),
            click.option("--base-url", metavar="URL", help="Base URL of an upstream, such as https://host/v1."),
            click.option("--model", "upstream_model", metavar="NAME", help="The model's name at the upstream."),
            click.option("--preset", metavar="NAME", help="Known upstream, such as openai, anthropic, groq or vllm."),
            click.option("--credential", "credential_id", type=int, metavar="ID", help="See `millrace credentials`."),
            click.option("--allow-internal/--no-allow-internal", default=None, help="Allow internal addresses."),
            click.option("--concurrency", type=int, help="Concurrent requests of a replica to the upstream."),
            click.option("--command", help="Command of a managed engine, such as `vllm serve {model} --port {port}`."),
            click.option("--task", type=click.Choice(["generate", "embed"]), help="Task of the upstream's model."),
            click.option("--dimensions", type=int, help="Numbers of a vector, if the task is embed."),
            click.option("--images/--no-images", default=None, help="Whether the upstream's model reads images."),
            click.option("--tools/--no-tools", default=None, help="Whether the upstream's model calls tools."),
            click.option("--reasoning/--no-reasoning", default=None, help="Whether the upstream's model reasons."),
        )
    ):
        decorated = option(decorated)
    found: Callable[..., None] = decorated
    return found


@command(deployments, "list", example="millrace deployments list")
def list_deployments(session: Session) -> None:
    """List the deployments with their states."""
    session.rows(session.client.operator.deployments.list(), _DEPLOYMENT, empty="No deployments.")


@command(deployments, "show", example="millrace deployments show llama")
@click.argument("name")
def show_deployment(session: Session, name: str) -> None:
    """Show a deployment and its replicas."""
    found = session.client.operator.deployments.get(name)
    session.one(found, _DETAILS)
    if not session.as_json:
        click.echo()
        output.print_table(found["replicas"], _REPLICA, "No replicas.")


@command(deployments, "add", example="millrace deployments add llama --source /models/Llama-3.2-1B-Instruct")
@click.argument("name")
@click.option("--source", help="embedded, a model directory or a .gguf file.")
@click.option(
    "--engine", type=ENGINES, help="millrace loads the model itself; others are upstreams; default: millrace."
)
@click.option("--credential-env", metavar="VAR", help="Environment variable with the upstream's API key, to store.")
@_options
@click.option("--force", is_flag=True, default=None, help="Use a source that fails the check.")
@click.option("--dry-run", is_flag=True, help="Only check the values and the source.")
def add_deployment(session: Session, name: str, dry_run: bool, credential_env: str | None, **options: Any) -> None:
    """Add a deployment: a model that workers load, or a model of an upstream."""
    fields = _fields(options)
    if "source" not in fields and fields.get("engine", "millrace") == "millrace":
        fail("Name a model with --source, or an upstream with --engine, --base-url and --model.", USAGE)
    if credential_env is not None:
        fields["secret"] = read_secret(credential_env)
    resource = session.client.operator.deployments
    if dry_run:
        found = resource.check(name=name, **fields)
        session.done(found, f"{name} can be added.")
        _warn_unchecked(found)
        return
    row = resource.create(name=name, **fields)
    session.done(row, f"Added the deployment {name}.")
    _warn_unchecked(row)
    _offer_price(session, row)


@command(deployments, "update", example="millrace deployments update llama --revision v2")
@click.argument("name")
@click.option("--source", help="embedded, a model directory or a .gguf file.")
@_options
@click.option("--force", is_flag=True, default=None, help="Use a source that fails the check.")
def update_deployment(session: Session, name: str, **options: Any) -> None:
    """Change a deployment. A new version is loaded first and replaces the old one without failed requests."""
    row = session.client.operator.deployments.update(name, **_fields(options))
    session.done(row, f"Updated the deployment {name}: version {row['version']}.")
    _warn_unchecked(row)


def _action(name: str, text: str, done: str) -> None:
    @command(deployments, name, example=f"millrace deployments {name} llama --wait")
    @click.argument("name")
    @click.option("--wait", is_flag=True, help="Wait until the state is reached.")
    def run(session: Session, wait: bool, **arguments: str) -> None:
        deployment = arguments["name"]
        row = getattr(session.client.operator.deployments, name)(deployment)
        if wait:
            row = _wait_for(session, deployment, _WAIT_STATES[name])
        session.done(row, done.format(name=deployment))

    deployments.commands[name].help = text


_action("load", "Load a deployment, or accept requests again after a drain.", "{name} is wanted loaded.")
_action("drain", "Accept no more requests. Running streams end; the weights stay loaded.", "{name} is wanted drained.")
_action("unload", "Drain a deployment, then drop its weights.", "{name} is wanted unloaded.")


@command(deployments, "price", example="millrace deployments price llama")
@click.argument("name")
def draft_price(session: Session, name: str) -> None:
    """Draft the offered price of a deployment without one."""
    draft = session.client.operator.deployments.draft_price(name)
    publishing = format_command(f"prices publish {draft['id']}")
    text = f"Draft {draft['id']}. Another operator publishes it: {publishing}"
    session.done(draft, text)


@command(deployments, "import", example="millrace deployments import deployments.yaml")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def import_deployments(session: Session, file: Path) -> None:
    """Create or update the deployments of a YAML file. Others stay as they are."""
    result = session.client.operator.deployments.import_list(deployments=_read_file(file))
    lines = [f"{change}: {', '.join(result[change]) or '–'}" for change in ("created", "updated", "unchanged")]
    session.done(result, *lines)


@command(deployments, "test", example="millrace deployments test llama")
@click.argument("name")
@click.option("--api-key", envvar="MILLRACE_API_KEY", help="API key that pays for the request.")
@click.option("--prompt", help="Text of the request; default: a greeting.")
@click.option("--stream", is_flag=True, help="Measure the time to the first token. A stream reports no cost.")
def test_deployment(session: Session, name: str, api_key: str | None, prompt: str | None, stream: bool) -> None:
    """Send one short request, and print the response, its latency, usage and cost."""
    from millrace.client import testing  # imports httpx2

    if not api_key:
        fail("Set MILLRACE_API_KEY or --api-key: the request is billed to the key's tenant.", FAILED)
    url = find_connection(session.profile, os.environ, config_path()).url
    try:
        result = testing.send_test_call(url, api_key, name, prompt or testing.PROMPT, stream=stream)
    except testing.TestCallFailed as exc:
        fail(str(exc))
    if session.as_json:
        output.print_json(asdict(result))
    else:
        click.echo("\n".join(map(output.printable, result.text.split("\n"))))
        click.echo(result.summary)


def _warn_unchecked(row: Mapping[str, Any]) -> None:
    if row["unchecked"]:
        click.echo(row["unchecked"], err=True)


def _offer_price(session: Session, row: Mapping[str, Any]) -> None:
    if row["has_price"]:
        return
    name = row["name"]
    offer = ", ".join(f"{price['component']} {price['usd_per_million']}" for price in row["offered_price"])
    click.echo(f"{name} has no price, so its requests get 503 model_not_priced.", err=True)
    drafting = format_command(f"deployments price {name}")
    click.echo(f"Offered price, USD per 1M tokens: {offer}. To draft it: {drafting}", err=True)


def _wait_for(session: Session, name: str, states: tuple[str, ...]) -> Any:
    """Wait until the deployment has one of the states."""
    give_up_at = time.monotonic() + WAIT_SECONDS
    while True:
        row = session.client.operator.deployments.get(name)
        if row["state"] in states:
            return row
        if row["state"] == "failed":
            fail(f"{name} could not be loaded: {row['reason']}")
        if time.monotonic() > give_up_at:
            check = format_command(f"deployments show {name}")
            fail(f"{name} is {row['state']} after {WAIT_SECONDS:.0f} s. Check `{check}`.")
        time.sleep(POLL_SECONDS)


def _fields(options: dict[str, Any]) -> dict[str, Any]:
    """Return the given options as fields of the API."""
    fields = given_options(options)
    if "pools" in fields:
        fields["pools"] = dict(_pool(text) for text in fields["pools"])
    return fields


def _pool(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if not name or not count.isdecimal():
        fail(f"--pool {text!r}: enter a pool and its number of replicas, such as default=1", FAILED)
    return name, int(count)


def _read_file(path: Path) -> list[dict[str, Any]]:
    """Return the deployments of a YAML file: a list, or a mapping with the key `deployments`."""
    import yaml

    if path.stat().st_size > MAX_FILE_BYTES:
        fail(f"{path} is larger than {MAX_FILE_BYTES} bytes.", FAILED)
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        fail(f"{path} cannot be read as YAML: {exc}", FAILED)
    entries = found.get("deployments") if isinstance(found, dict) else found
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        fail(f"{path}: want a list of deployments, each with name and source.", FAILED)
    try:
        plain: list[dict[str, Any]] = json.loads(json.dumps(entries, default=str))  # a date can be a revision
    except (TypeError, ValueError) as exc:
        fail(f"{path}: want a list of deployments, each with name and source: {exc}", FAILED)
    return plain
