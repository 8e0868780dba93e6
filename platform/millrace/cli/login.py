"""`millrace login`, `logout` and `profiles`: the stored connections."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from inference_worker.contract.command_line import format_command
from millrace.cli import output
from millrace.cli.app import NOT_ALLOWED, ApiCommand, fail, make_client, with_exit_codes
from millrace.cli.output import Column
from millrace.cli.profiles import (
    API_KEY,
    DEFAULT_URL,
    URL,
    Connection,
    changed_profiles,
    config_path,
    profile_name,
    read_profiles,
)

if TYPE_CHECKING:
    import httpx2

_CODE_PATH = "/account/mfa/authenticate/"


class _Login(ApiCommand):
    example = "millrace login --url https://millrace.example.com --profile production"


class _Logout(ApiCommand):
    example = "millrace logout --profile production"


class _Profiles(ApiCommand):
    example = "millrace profiles --use production"


@click.command(cls=_Login)
@click.option("--url", envvar=URL, metavar="URL", help=f"URL of the platform; default: {DEFAULT_URL}.")
@click.option("--profile", metavar="NAME", help="Name to store the connection under; default: the current profile.")
@click.option("--operator", is_flag=True, help="Sign in as an operator, with email address and password.")
def login(url: str | None, profile: str | None, operator: bool) -> None:
    """Store the URL and an API key, or the session of an operator.

    The API key needs the scope `manage`. It is read from the terminal, from standard input or from MILLRACE_API_KEY.
    The file is private: only your user can read it.
    """
    with_exit_codes(lambda: _login(url, profile, operator))


def _login(url: str | None, profile: str | None, operator: bool) -> None:
    path = config_path()
    stored = read_profiles(path)
    name = profile_name(profile, os.environ, stored)
    known = stored.profiles.get(name)
    address = (url or (known.url if known else DEFAULT_URL)).rstrip("/")
    if urlsplit(address).scheme not in ("http", "https"):
        raise click.UsageError(f"{address!r} is not a URL: it must start with https:// or http://.")
    connection = _operator_connection(address) if operator else _key_connection(address)
    with changed_profiles(path) as changed:
        changed.profiles[name] = connection
        changed.current = name
    click.echo(f"Signed in to {connection.url} as {connection.who} (profile {name}, stored in {path}).")


def _key_connection(url: str) -> Connection:
    key = os.environ.get(API_KEY, "").strip() or _secret("API key (with the scope manage)")
    if not key:
        raise click.UsageError("The API key is empty. Create one with the scope `manage` in the console.")
    with make_client(Connection(url, key)) as client:
        tenant = client.tenant.get()
    return Connection(url, key, who=f"tenant {tenant['slug']}")


def _secret(title: str) -> str:
    """Read a secret from the terminal without showing it, or the first line of another standard input."""
    if sys.stdin.isatty():
        return str(click.prompt(title, hide_input=True))
    return sys.stdin.readline().strip()


def _operator_connection(url: str) -> Connection:
    """Sign in like a browser: with a password and, if the user has a second factor, a code."""
    import httpx2

    from millrace.client import ConnectionFailed, NotFound

    email = str(click.prompt("Email address"))
    password = _secret("Password")
    try:
        with httpx2.Client(base_url=url, headers={"Referer": url}, timeout=30) as browser:
            browser.get("/login").raise_for_status()
            form = {"login": email, "password": password, "remember": "on"}
            answer = browser.post(
                "/login", data=_with_token(browser, form), headers={"X-Requested-With": "XMLHttpRequest"}
            )
            if not answer.is_success:
                fail(f"{_form_error(answer)} Run `{format_command('login --operator')}` again.", NOT_ALLOWED)
            if urlsplit(str(answer.json().get("location"))).path == _CODE_PATH:
                code = _secret("Code of the second factor")
                if browser.post(_CODE_PATH, data=_with_token(browser, {"code": code})).status_code != 302:
                    fail(f"The code is wrong. Run `{format_command('login --operator')}` again.", NOT_ALLOWED)
            cookies = {cookie.name: str(cookie.value) for cookie in browser.cookies.jar}
    except (httpx2.HTTPError, ValueError) as exc:
        raise ConnectionFailed(f"cannot sign in at {url}: {exc}") from exc
    connection = Connection(url, cookies=cookies, who=f"operator {email}")
    with make_client(connection) as client:
        try:
            next(iter(client.operator.tenants.list(page_size=1)), None)
        except NotFound:
            login_command = format_command("login")
            fail(f"{email} is not an operator. To use a tenant, run `{login_command}` with an API key.", NOT_ALLOWED)
    return connection


def _with_token(browser: httpx2.Client, form: Mapping[str, str]) -> dict[str, str]:
    return {**form, "csrfmiddlewaretoken": browser.cookies.get("csrftoken") or ""}


def _form_error(answer: httpx2.Response) -> str:
    try:
        form = answer.json()["form"]
        errors = [*form["errors"], *(text for each in form["fields"].values() for text in each["errors"])]
    except (ValueError, KeyError, TypeError):
        errors = []
    return " ".join(errors) or f"The sign-in failed with status {answer.status_code}."


@click.command(cls=_Logout)
@click.option("--profile", metavar="NAME", help="Profile to remove; default: the current one.")
@click.option("--local", is_flag=True, help="Only remove the stored connection. An operator's session stays valid.")
def logout(profile: str | None, local: bool) -> None:
    """Remove a stored connection, and end an operator's session.

    API keys stay valid: revoke them with `millrace keys revoke`.
    """
    with_exit_codes(lambda: _logout(profile, local))


def _logout(profile: str | None, local: bool) -> None:
    stored = read_profiles(config_path())
    name = profile_name(profile, os.environ, stored)
    connection = stored.profiles.get(name)
    if connection is not None and connection.cookies and not local:
        _end_session(connection)
    with changed_profiles(config_path()) as stored:
        if stored.profiles.get(name) != connection:
            logout_command = format_command(f"logout --profile {name}")
            fail(f"The profile {name} was changed meanwhile. Run `{logout_command}` again.")
        removed = stored.profiles.pop(name, None)
        if stored.current == name and stored.profiles:
            stored.current = sorted(stored.profiles)[0]
    click.echo(f"Removed the profile {name}." if removed else f"There is no profile {name}.")


def _end_session(connection: Connection) -> None:
    """End the session at the server. A session that has ended already is no error."""
    import httpx2

    from millrace.client import ConnectionFailed

    url, cookies = connection.url, dict(connection.cookies or {})
    advice = f"Try again, or remove only the stored connection: {format_command('logout --local')}"
    try:
        with httpx2.Client(base_url=url, cookies=cookies, headers={"Referer": url}, timeout=30) as browser:
            answer = browser.post("/logout", data=_with_token(browser, {}))
    except httpx2.HTTPError as exc:
        raise ConnectionFailed(f"cannot end the session at {url}: {exc}. {advice}") from exc
    target = answer.next_request
    if target is None or _origin(target.url) != _origin(httpx2.URL(url)):  # such as to the sign-in page of a proxy
        fail(f"The session at {url} was not ended (status {answer.status_code}). {advice}")


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


@click.command(cls=_Profiles)
@click.option("--use", metavar="NAME", help="Make this profile the current one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def profiles(use: str | None, as_json: bool) -> None:
    """List the stored connections, or choose the current one."""
    with_exit_codes(lambda: _profiles(use, as_json))


def _profiles(use: str | None, as_json: bool) -> None:
    if use:
        with changed_profiles(config_path()) as stored:
            if use not in stored.profiles:
                login_command = format_command(f"login --profile {use}")
                raise click.UsageError(f"There is no profile {use!r}. Create it: {login_command}")
            stored.current = use
    stored = read_profiles(config_path())
    rows = [
        {"name": name, "url": each.url, "as": each.who, "current": name == stored.current}
        for name, each in sorted(stored.profiles.items())
    ]
    if as_json:
        output.print_json(rows)
        return
    columns = [Column("name", "name"), Column("url", "url"), Column("signed in as", "as")]
    columns.append(Column("current", "current", output.yes_no))
    output.print_table(rows, columns, f"No profiles. Run `{format_command('login')}`.")
