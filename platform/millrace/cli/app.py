"""The parts of all commands that use the management API: options, connection, output and exit codes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

from inference_worker.contract.command_line import format_command, format_quoted_commands
from millrace.cli import output
from millrace.cli.output import Column
from millrace.cli.profiles import Connection, NotSignedIn, config_path, find_connection
from millrace.local import INSTALL_SERVER

if TYPE_CHECKING:
    from millrace.client import Client, StatusError

FAILED, USAGE, NOT_ALLOWED, NOT_FOUND, TRY_AGAIN = 1, 2, 3, 4, 5
EXIT_CODES = """\
exit codes: 0 success; 1 failure; 2 wrong usage; 3 not signed in, or no permission; 4 not found; 5 the server is
overloaded or cannot be reached, try again later"""
DEFAULT_ROWS = 50
Command = Callable[..., Any]


class Session:
    """One run of a command: its client and its output."""

    def __init__(self, profile: str | None, as_json: bool) -> None:
        self.profile = profile
        self.as_json = as_json

    @functools.cached_property
    def client(self) -> Client:
        return make_client(find_connection(self.profile, os.environ, config_path()))

    def find_currency(self) -> str:
        """Return the currency in which the tenant is billed."""
        return str(self.client.billing_currency.get()["currency"])

    def tenant_client(self, slug: str) -> Client:
        """Return a client for one tenant, for operators."""
        return make_client(find_connection(self.profile, os.environ, config_path()), tenant=slug)

    def rows(
        self, rows: Iterable[Any], columns: Sequence[Column], *, empty: str = "Nothing found.", limit: int | None = None
    ) -> None:
        """Print rows, at most `limit` of them."""
        found = list(rows if limit is None else itertools.islice(rows, limit + 1))
        is_cut = limit is not None and len(found) > limit
        found = found[:limit]
        if self.as_json:
            output.print_json(found)
        else:
            output.print_table(found, columns, empty)
        if is_cut:
            click.echo(f"There are more than {limit}: use --limit to see more.", err=True)

    def one(self, row: Mapping[str, Any], columns: Sequence[Column]) -> None:
        """Print one object."""
        if self.as_json:
            output.print_json(row)
        else:
            output.print_fields(row, columns)

    def done(self, row: Any, *lines: str) -> None:
        """Print the result of a change: a sentence or several lines, or the object as JSON."""
        if self.as_json:
            output.print_json(row)
        else:
            click.echo("\n".join(map(output.printable, lines)))


def make_client(connection: Connection, tenant: str | None = None) -> Client:
    from millrace.client import Client

    return Client(connection.url, connection.api_key, cookies=connection.cookies, tenant=tenant)


class CommandHelp(click.Command):
    """A command whose help contains commands as they can be typed in this installation."""

    def get_help(self, ctx: click.Context) -> str:
        return format_quoted_commands(super().get_help(ctx))


class ResourceGroup(CommandHelp, click.Group):
    """A group of commands about one type of object. Without a command it runs `default`."""

    def __init__(self, *args: Any, default: str = "list", **options: Any) -> None:
        super().__init__(*args, **options)
        self.default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0].startswith("-") and args[0] not in ("-h", "--help")):
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            for each in self.commands.values():
                formatter.write(f"{'':>{formatter.current_indent}}{format_example(getattr(each, 'example', ''))}\n")


class ApiCommand(CommandHelp):
    """A command with an example in its help."""

    example = ""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Example"):
            formatter.write(f"{'':>{formatter.current_indent}}{format_example(self.example)}\n")


def command(group: click.Group, name: str, *, example: str, rows: bool = False) -> Callable[[Command], Command]:
    """Add a function to a group as a command; see `api_command`."""

    def decorate(function: Command) -> Command:
        group.add_command(api_command(name, function, example=example, rows=rows))
        return function

    return decorate


def api_command(name: str, function: Command, *, example: str, rows: bool = False) -> ApiCommand:
    """Return a function as a command. It receives a `Session` first, and its errors become exit codes.

    Args:
        example: a command line, shown in the help.
        rows: whether it prints a list and has the option --limit.
    """

    @functools.wraps(function)
    def run(*args: Any, profile: str | None, as_json: bool, **options: Any) -> None:
        session = Session(profile, as_json)

        def run_function() -> None:
            with output.tenant_currency(session.find_currency):
                function(session, *args, **options)

        with_exit_codes(run_function)

    decorated: Any = run
    if rows:
        text = f"Most rows to print; default: {DEFAULT_ROWS}."
        decorated = click.option("--limit", type=click.IntRange(1), default=DEFAULT_ROWS, help=text)(decorated)
    decorated = click.option("--profile", metavar="NAME", help="Profile of `millrace login`.")(decorated)
    decorated = click.option("--json", "as_json", is_flag=True, help="Print JSON.")(decorated)
    made = click.command(name, cls=ApiCommand)(decorated)
    made.example = example
    return made


def format_example(example: str) -> str:
    """Return an example, which begins with `millrace`, as it can be typed in this installation."""
    return re.sub(r"\bmillrace(?= )", lambda _: format_command(), example)


def given_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given. Repeatable ones are empty if they were not."""
    return {name: value for name, value in options.items() if value is not None and value != ()}


def with_exit_codes(run: Callable[[], None]) -> None:
    """Run a command. Its errors are printed with advice, and end the process with an exit code."""
    from millrace.client import errors

    try:
        run()
    except NotSignedIn as exc:
        fail(str(exc), NOT_ALLOWED)
    except errors.StatusError as exc:
        fail(f"{exc}{_advice(exc)}", _exit_code(exc))
    except errors.ConnectionFailed as exc:
        fail(f"{exc}. Check the URL, and that the platform runs.", TRY_AGAIN)


@contextlib.contextmanager
def server_packages() -> Iterator[None]:
    """Name the extra to install if a package of the platform is missing."""
    try:
        yield
    except ModuleNotFoundError as exc:
        fail(f"the package {exc.name} is not installed; {INSTALL_SERVER}")


def fail(text: str, status: int = FAILED) -> NoReturn:
    """Print an error and end the process."""
    click.echo(f"millrace: {output.printable(text)}", err=True)
    sys.exit(status)


def _exit_code(exc: StatusError) -> int:
    if exc.status in (401, 403):
        return NOT_ALLOWED
    if exc.status == 404:
        return NOT_FOUND
    return TRY_AGAIN if exc.status in (429, 502, 503, 504) else FAILED


def _advice(exc: StatusError) -> str:
    from millrace.client import errors

    if isinstance(exc, errors.ReauthenticationNeeded):
        login = format_command("login --operator")
        return f" Run `{login}` again: changes need a sign-in of the last 5 minutes."
    if isinstance(exc, errors.AuthenticationFailed):
        login = format_command("login")
        return f" Run `{login}`; commands for operators need `{login} --operator`."
    if isinstance(exc, errors.RateLimited) and exc.retry_after is not None:
        return f" Try again in {exc.retry_after:.0f} s."
    return ""
