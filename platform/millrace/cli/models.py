"""`millrace models`: the models in this machine's data directory, and whether it can serve others."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from inference_worker.contract.command_line import format_command
from millrace.cli import output
from millrace.cli.app import FAILED, NOT_ALLOWED, NOT_FOUND, TRY_AGAIN, ApiCommand, ResourceGroup, fail, server_packages
from millrace.cli.output import Column, moment

if TYPE_CHECKING:
    from inference_worker.checkpoints.downloads.hub_source import HubSource
    from inference_worker.checkpoints.model_store import ModelStore, StoredModel

_QUANTIZATIONS = click.Choice(["none", "int8", "int4", "int4-g64", "int4-g128", "fp8", "gguf"])
_KV_DTYPES = click.Choice(["auto", "int8", "fp8"])
_EXIT_CODES = {"not_found": NOT_FOUND, "no_access": NOT_ALLOWED, "unreachable": TRY_AGAIN, "offline": TRY_AGAIN}
_MODEL = [
    Column("model", "repository"),
    Column("revision", "revision"),
    Column("commit", "commit", lambda commit: str(commit)[:12]),
    Column("size", "num_bytes", output.size, right=True),
    Column("state", "state"),
    Column("pulled", "pulled_at", moment),
    Column("source", "source"),
]


@click.group(cls=ResourceGroup)
def models() -> None:
    """Pull, inspect and remove models of this machine."""


def _command(name: str, example: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds a function to the group as a command with the common options.

    Errors of models end the process with an exit code.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(data_dir: str | None, **options: Any) -> None:
            if data_dir:
                os.environ["MILLRACE_DATA_DIR"] = str(Path(data_dir).expanduser().absolute())
            with server_packages():
                _with_exit_codes(lambda: function(**options))

        decorated: Any = click.option("--json", "as_json", is_flag=True, help="Print JSON.")(run)
        text = "Directory of all data (MILLRACE_DATA_DIR)."
        decorated = click.option("--data-dir", metavar="DIR", help=text)(decorated)
        made = click.command(name, cls=ApiCommand)(decorated)
        made.example = example
        models.add_command(made)
        return function

    return decorate


def _source_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the argument MODEL and the options that select its revision."""
    for decorate in (
        click.option("--file", metavar="NAME", help="The .gguf file of a repository that has several."),
        click.option("--revision", metavar="NAME", help="Branch, tag or commit; default: main."),
        click.argument("model"),
    ):
        function = decorate(function)
    return function


def _with_exit_codes(run: Callable[[], None]) -> None:
    from inference_worker.checkpoints.model_config import ModelError
    from inference_worker.contract.env import SettingsError
    from millrace.local.checks import CheckFailed

    try:
        run()
    except ModelError as exc:
        fail(str(exc), _EXIT_CODES.get(getattr(exc, "code", ""), FAILED))
    except (CheckFailed, SettingsError) as exc:
        fail(str(exc))
    except OSError as exc:
        fail(f"{exc.filename or 'the data directory'}: {exc.strerror or exc}; check its owner and mode")


@_command("pull", "millrace models pull Qwen/Qwen3-0.6B")
@_source_options
def pull(model: str, revision: str | None, file: str | None, as_json: bool) -> None:
    """Download a model from the Hugging Face hub.

    MODEL is organization/name. For a gated or private model, set HF_TOKEN. An interrupted download is continued.
    """
    from inference_worker.checkpoints.downloads.hub import Hub
    from millrace.cli.model_progress import show_progress

    store, min_free_bytes = _writable_store()
    source = _hub_source(model, revision, file)
    with show_progress() as progress:
        pulled = Hub().pull(source, store, progress, min_free_bytes)
    if as_json:
        output.print_json(_as_json(pulled))
    else:
        size = output.size(pulled.num_bytes)
        click.echo(f"Pulled {pulled.repository} ({size}, commit {pulled.commit[:12]}) to {pulled.source}")


@_command("list", "millrace models list")
def list_models(as_json: bool) -> None:
    """List the pulled models, including those whose download was interrupted."""
    store = _store()
    rows: list[dict[str, Any]] = [_as_json(model) for model in store.models()]
    for partial in store.partial_models():
        values = {"repository": partial.repository, "commit": partial.directory.name, "num_bytes": partial.num_bytes}
        rows.append({**dict.fromkeys(("revision", "license", "pulled_at", "source")), **values, "state": "incomplete"})
    if as_json:
        output.print_json(rows)
    else:
        pull_command = format_command("models pull organization/name")
        output.print_table(rows, _MODEL, f"No models. `{pull_command}` downloads one.")


@_command("inspect", "millrace models inspect Qwen/Qwen3-0.6B --context 8192")
@_source_options
@click.option("--context", type=click.IntRange(1), help="Tokens of each stream; default: the model's maximum.")
@click.option("--dtype", type=click.Choice(["auto", "bfloat16", "float16", "float32"]), default="auto", help="To use.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where to compute.")
@click.option("--quantization", type=_QUANTIZATIONS, default="none", help="Of the weights at load.")
@click.option("--kv-dtype", type=_KV_DTYPES, default="auto", help="Of the keys and values in the KV cache.")
@click.option("--kv-memory", metavar="SIZE", help="Of the KV cache: 2GiB, or a share of the free memory such as 0.5.")
def inspect(model: str, revision: str | None, file: str | None, as_json: bool, **options: Any) -> None:
    """Show whether this machine can serve a model, without loading it.

    MODEL is a directory, a .gguf file, or organization/name on the Hugging Face hub. Of a model on the hub, only
    configuration files and the headers of weights are downloaded. The exit code is 1 if the model cannot be served.
    """
    from millrace.cli.model_report import inspect_source, print_report

    found = Path(model).expanduser()
    source = found if found.exists() else _hub_source(model, revision, file)
    result = inspect_source(source, _store(), **options)
    if as_json:
        output.print_json(result)
    else:
        print_report(result)
    if not result["can_serve"]:
        raise SystemExit(FAILED)


@_command("verify", "millrace models verify Qwen/Qwen3-0.6B")
@_source_options
def verify(model: str, revision: str | None, file: str | None, as_json: bool) -> None:
    """Compare the files of a pulled model with their checksums.

    MODEL is organization/name, a directory of a pulled model, or a .gguf file. A file that was not pulled has no known
    checksum: its size is compared with its header, and its checksum is printed.
    """
    from inference_worker.checkpoints.model_store import find_stored

    path = Path(model).expanduser()
    if path.exists():
        stored = find_stored(path)
        if stored is None:
            _verify_file(path, as_json=as_json)
        else:
            _verify_stored(stored, as_json=as_json)
        return
    store = _store()
    source = _hub_source(model, revision, file)
    found = store.find(source.repository, revision, source.file)
    if found is None:
        fail(f"{source.repository}: not pulled; `{format_command('models list')}` shows the models", NOT_FOUND)
    _verify_stored(found, as_json=as_json)


def _verify_stored(found: StoredModel, *, as_json: bool) -> None:
    """Compare the files of a pulled model with their checksums, and print the result."""
    from millrace.cli.model_progress import show_progress

    with show_progress() as progress:
        problems = _store().verify(found, progress)
    if as_json:
        output.print_json({**_as_json(found), "problems": problems})
    else:
        text = f"{found.files[0].path} of {found.repository} matches its checksum."
        if len(found.files) > 1:
            text = f"All {len(found.files)} files of {found.repository} match their checksums."
        click.echo("\n".join(map(output.printable, problems or [text])))
    if problems:
        removal = format_command(f"models remove {found.repository}")
        fail(f"{len(problems)} files are damaged: run `{removal}` and pull it again")


def _verify_file(path: Path, *, as_json: bool) -> None:
    """Compare the size of a .gguf file with its header, and print its checksum."""
    from inference_worker.checkpoints.inspection import inspect_checkpoint
    from inference_worker.checkpoints.model_store import compute_checksum
    from millrace.cli.model_progress import show_progress

    if path.is_dir():
        fail(f"{path}: was not pulled, so its files have no known checksums; name a .gguf file", NOT_FOUND)
    problems = [problem.message for problem in inspect_checkpoint(path).problems if problem.code == "damaged_file"]
    with show_progress() as progress:
        checksum = compute_checksum(path, progress)
    if as_json:
        output.print_json({"source": str(path), "sha256": checksum, "problems": problems})
    else:
        text = f"{path} is as long as its header says. Compare its SHA-256 with the publisher's: {checksum}"
        click.echo("\n".join(map(output.printable, problems or [text])))
    if problems:
        fail(f"{path} is damaged: download it again")


@_command("remove", "millrace models remove Qwen/Qwen3-0.6B")
@_source_options
def remove(model: str, revision: str | None, file: str | None, as_json: bool) -> None:
    """Remove a pulled model, or the files of an interrupted download.

    If the model was pulled in several revisions, name one. A deployment that runs keeps its model until it loads it
    again. `millrace deployments list` shows the deployments.
    """
    store = _store()
    source = _hub_source(model, revision, file)
    directories = store.directories(source.repository, revision, source.file)
    if not directories:
        fail(f"{source.repository}: not pulled; `{format_command('models list')}` shows the models", NOT_FOUND)
    if len(directories) > 1:
        names = ", ".join(path.name for path in directories)
        fail(f"{source.repository}: pulled several times; choose one with --revision and --file: {names}")
    store.remove(directories[0])
    if as_json:
        output.print_json({"repository": source.repository, "directory": str(directories[0]), "removed": True})
    else:
        click.echo(f"Removed {source.repository} from {directories[0]}")
        click.echo("Deployments of this model cannot load it again until it is pulled.", err=True)


def _store() -> ModelStore:
    from inference_worker.checkpoints.model_store import ModelStore
    from millrace.environment.configuration import data_dir

    return ModelStore(data_dir())


def _writable_store() -> tuple[ModelStore, int]:
    """Return the store, whose data directory is created, and the bytes to leave free on its disk."""
    from inference_worker.contract import env
    from inference_worker.contract.settings import SharedSettings
    from millrace.environment.configuration import data_dir
    from millrace.local.checks import data_directory

    min_free_bytes: int = env.read_one(os.environ, SharedSettings, "min_free_disk")
    data_directory(data_dir(), min_free_bytes)
    os.umask(0o077)  # models may be confidential
    return _store(), min_free_bytes


def _hub_source(model: str, revision: str | None, file: str | None) -> HubSource:
    """Return the model of the argument `organization/name[@revision][#file]`; options take precedence."""
    from dataclasses import replace

    from inference_worker.checkpoints.downloads.hub_source import HubSource

    source = HubSource.parse(model)
    source = replace(source, revision=revision or source.revision, file=file or source.file)
    source.check()
    return source


def _as_json(model: StoredModel) -> dict[str, Any]:
    return {
        "repository": model.repository,
        "revision": model.revision,
        "commit": model.commit,
        "license": model.license,
        "pulled_at": model.pulled_at,
        "num_bytes": model.num_bytes,
        "source": str(model.source),
        "state": "complete",
    }
