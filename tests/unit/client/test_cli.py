"""The command line without a server: help, profiles, output, errors and exit codes."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import httpx2
import pytest
from click.testing import CliRunner, Result

from inference_worker.contract.command_line import format_command
from millrace import cli
from millrace.cli import app, budgets, output
from millrace.cli.app import ResourceGroup
from millrace.cli.command_reference import commands_as_markdown
from millrace.cli.deployments import _read_file
from millrace.cli.profiles import Connection, NotSignedIn, changed_profiles, config_path, find_connection, read_profiles
from millrace.client import Client

KEY = {
    "id": 1,
    "name": "ci",
    "prefix": "sk-mr-A",
    "project_id": 2,
    "scopes": ["inference"],
    "expires_at": None,
    "last_used_at": "2026-11-01T10:30:00+01:00",
    "live": True,
    "revoked_at": None,
}


@pytest.fixture(autouse=True)
def _no_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("MILLRACE_URL", "MILLRACE_API_KEY", "MILLRACE_PROFILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Return a function that runs a command line against a server with these replies."""

    def run(line: list[str], *replies: httpx2.Response, stdin: str | None = None) -> Result:
        pending = list(replies)

        def make_client(connection: Connection) -> Client:
            transport = httpx2.MockTransport(lambda _: pending.pop(0))
            return Client(
                connection.url, connection.api_key, cookies=connection.cookies, max_retries=0, transport=transport
            )

        monkeypatch.setattr(app, "make_client", make_client)
        monkeypatch.setattr("millrace.cli.login.make_client", make_client)
        return CliRunner().invoke(cli.root, line, input=stdin)

    return run


def signed_in() -> None:
    with changed_profiles(config_path()) as stored:
        stored.profiles["default"] = Connection("http://host", "sk-mr-x", who="tenant acme")


def page(*rows: Any, cursor: str | None = None) -> httpx2.Response:
    return httpx2.Response(200, json={"next": cursor and f"http://host/?cursor={cursor}", "results": list(rows)})


# Help


def commands(
    group: click.Group = cli.root, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


COMMANDS = {" ".join(path): command for path, command in commands()}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_a_text_and_an_example(name):
    command = COMMANDS[name]
    assert command.help
    if name == "manage":  # passes --help on
        return
    said = CliRunner().invoke(cli.root, [*name.split(), "--help"])
    assert said.exit_code == 0, said.output
    assert f"millrace {name.split()[0]}" in said.output.split("Example")[1]
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, (name, parameter.name)


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if getattr(command, "example", "")])
def test_example_is_a_valid_command_line(name):
    words = shlex.split(COMMANDS[name].example.replace('eval "$(', "").replace(')"', ""))
    path, command = name.split(), COMMANDS[name]
    group = COMMANDS.get(path[0])
    if isinstance(group, ResourceGroup) and words[2:3] != path[1:]:
        assert path[1:] == [group.default]  # the default may be omitted
        path = path[:1]
    assert words[1 : 1 + len(path)] == path
    # The files of these do not exist.
    policies = {"policies dry-run", "policies save-draft", "policies validate"}
    without_file = {*policies, "prices import", "price quote", "price rerate", "deployments import"}
    without_file |= {"billing import-exchange-rates", "billing import-payments", "billing set-chart"}
    without_file |= {"costs import", "import litellm"}
    if name not in without_file | {"reconcile", "router train"}:
        command.make_context(name, words[1 + len(path) :], **cli.root.context_settings)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell):
    assert "_MILLRACE_COMPLETE" in CliRunner().invoke(cli.root, ["completion", shell]).output


def test_unknown_command_is_wrong_usage():
    assert CliRunner().invoke(cli.root, ["key"]).exit_code == 2


def test_a_policy_is_read_from_a_file_or_from_options(run, tmp_path):
    signed_in()
    path = tmp_path / "policy.json"
    assert "Give either --file or --model" in run(["policies", "publish", "a"]).output
    assert "Give either --file or --model" in run(["policies", "publish", "a", "--model", "m", "--file", "-"]).output
    for content, problem in (("{", "is not JSON"), ("[]", "is not a policy")):
        path.write_text(content)
        said = run(["policies", "publish", "a", "--file", str(path)])
        assert (said.exit_code, problem in said.output) == (app.USAGE, True)


def test_reference_has_every_command_and_option():
    page = commands_as_markdown()
    for name, command in COMMANDS.items():
        assert f"# millrace {name}\n" in page
        for parameter in command.params:
            assert not isinstance(parameter, click.Option) or parameter.opts[0] in page


# Profiles


def test_login_stores_the_key_privately(run):
    said = run(
        ["login", "--url", "http://host/", "--profile", "work"],
        httpx2.Response(200, json={"slug": "acme"}),
        stdin="sk-mr-secret\n",
    )
    assert said.exit_code == 0, said.output
    assert "tenant acme" in said.output
    assert "sk-mr-secret" not in said.output
    path = config_path()
    assert path.stat().st_mode & 0o777 == 0o600
    stored = read_profiles(path)
    assert stored.current == "work"
    assert stored.profiles["work"] == Connection("http://host", "sk-mr-secret", who="tenant acme")


def test_wrong_key_is_not_stored(run):
    said = run(
        ["login"], httpx2.Response(401, json={"code": "authentication_failed", "detail": "Unknown key."}), stdin="x\n"
    )
    assert said.exit_code == app.NOT_ALLOWED
    assert f"Unknown key. Run `{format_command('login')}`" in said.output
    assert read_profiles(config_path()).profiles == {}


def test_profiles_are_listed_chosen_and_removed(run):
    signed_in()
    with changed_profiles(config_path()) as stored:
        stored.profiles["other"] = Connection("https://other", "sk-mr-y")
    assert json.loads(run(["profiles", "--use", "other", "--json"]).output)[1]["current"] is True
    assert run(["profiles", "--use", "missing"]).exit_code == 2
    assert "sk-mr" not in run(["profiles"]).output
    assert run(["logout"]).output == "Removed the profile other.\n"
    assert read_profiles(config_path()).current == "default"


def test_environment_comes_before_the_profiles():
    signed_in()
    path = config_path()
    assert find_connection(None, {}, path).api_key == "sk-mr-x"
    assert find_connection(None, {"MILLRACE_API_KEY": "k"}, path) == Connection("http://host", "k")
    both = {"MILLRACE_URL": "http://b", "MILLRACE_API_KEY": "k"}
    assert find_connection(None, both, path) == Connection("http://b", "k")
    assert find_connection("default", both, path).api_key == "sk-mr-x"
    with pytest.raises(NotSignedIn, match="login --profile x"):
        find_connection(None, {"MILLRACE_PROFILE": "x"}, path)
    with changed_profiles(path) as stored:
        stored.profiles["staging"] = Connection("http://staging", "sk-mr-s")
    named = {"MILLRACE_API_KEY": "k\n", "MILLRACE_PROFILE": "staging"}
    assert find_connection(None, named, path) == Connection("http://staging", "k")


def test_stored_key_is_not_sent_to_another_server():
    signed_in()
    with pytest.raises(NotSignedIn, match="set MILLRACE_API_KEY too"):
        find_connection(None, {"MILLRACE_URL": "http://elsewhere"}, config_path())


def test_damaged_file(run):
    config_path().parent.mkdir(parents=True)
    config_path().write_text("{}")
    said = run(["keys"])
    assert (said.exit_code, "is damaged: delete it" in said.output) == (app.NOT_ALLOWED, True)


def test_failed_change_leaves_the_file(tmp_path):
    signed_in()
    with pytest.raises(RuntimeError), changed_profiles(config_path()) as stored:
        stored.profiles.clear()
        raise RuntimeError
    assert read_profiles(config_path()).profiles
    assert sorted(os.listdir(config_path().parent)) == [".lock", "config.json"]


# Output


def test_table_without_a_terminal_has_no_color_and_is_not_cut(run):
    signed_in()
    said = run(["keys"], page(KEY | {"name": "n" * 300}))
    assert said.exit_code == 0, said.output
    header, row = said.stdout.splitlines()
    assert header.split()[:3] == ["id", "name", "prefix"]
    assert "n" * 300 in row
    assert "2026-11-01 09:30" in row
    assert "active" in row
    assert "\x1b" not in said.stdout


def test_color_on_request(run, monkeypatch):
    signed_in()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[32mactive" in run(["keys"], page(KEY)).stdout
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in run(["keys"], page(KEY)).stdout


def test_control_characters_do_not_reach_the_terminal(run):
    signed_in()
    assert "a?[2J" in run(["keys"], page(KEY | {"name": "a\x1b[2J"})).stdout


def test_lines_of_a_text_stay(run):
    signed_in()
    lines = [{"change": " ", "text": "{"}, {"change": "+", "text": "a\x1b[2J"}]
    assert run(["policies", "diff", "9"], httpx2.Response(200, json={"lines": lines})).stdout == "  {\n+ a?[2J\n"
    assert "equal" in run(["policies", "diff", "9"], httpx2.Response(200, json={"lines": []})).stdout


def test_json(run):
    signed_in()
    assert json.loads(run(["keys", "list", "--json"], page(KEY)).stdout) == [KEY]


def test_limit_says_that_there_are_more(run):
    signed_in()
    said = run(["keys", "list", "--limit", "1"], page(KEY, cursor="a"), page(KEY | {"id": 2}))
    assert len(said.stdout.splitlines()) == 2
    assert "more than 1" in said.stderr


BUDGET = {"id": 1, "name": "CI", "unit": "money", "amount": 1_234_500_000_000, "period": "month", "mode": "hard"}
BUDGET |= {"active": True, "budget_period": None}
CURRENCY = httpx2.Response(200, json={"currency": "JPY"})


def test_amounts_are_in_the_currency_of_the_tenant_which_is_requested_once(run):
    signed_in()
    said = run(["budgets"], page(BUDGET, BUDGET), CURRENCY)
    assert said.stdout.count("JPY 1,234.5") == 2
    assert "$" not in said.stdout


def test_output_without_amounts_of_money_does_not_request_the_currency(run):
    signed_in()
    tokens = BUDGET | {"unit": "tokens"}
    assert run(["budgets", "--json"], page(BUDGET)).exit_code == 0
    assert "1,234,500,000,000 tokens" in run(["budgets"], page(tokens)).stdout


def test_previews_of_operators_are_in_the_currency_of_the_book_or_invoice(run):
    signed_in()
    row = {"tenant_id": 1, "model": "m", "events": 2, "was_usd": "1.5", "would_be_usd": "2", "unpriced": 0}
    found = run(["prices", "preview", "4"], httpx2.Response(200, json=[row]), CURRENCY).stdout
    assert found.splitlines()[1].split() == ["1", "m", "2", "JPY", "1.5", "JPY", "2", "0"]
    row = {"tenant": "acme", "invoice": "INV-1", "month": "2026-11", "difference_usd": "-1.5", "currency": "EUR"}
    row |= {"subtotal": -150, "total": -179, "note": None}
    found = run(["price", "rerate", "4"], httpx2.Response(200, json=[row])).stdout
    assert found.splitlines()[1].split() == ["acme", "INV-1", "2026-11", "-€1.50", "-€1.50", "-€1.79", "–"]


def test_an_amount_in_dollars_is_refused_for_a_tenant_with_another_currency(run):
    signed_in()
    said = run(["budgets", "create", "CI", "--amount", "$5"], CURRENCY)
    assert said.exit_code == 2
    assert "the tenant's currency is JPY" in said.stderr
    assert run(["budgets", "create", "CI", "--amount", "$5", "--json"], *_in_dollars()).exit_code == 0


def _in_dollars() -> tuple[httpx2.Response, httpx2.Response]:
    return httpx2.Response(200, json={"currency": "USD"}), httpx2.Response(201, json=BUDGET)


def test_empty_list(run):
    signed_in()
    assert run(["keys"], page()).stdout == "No API keys.\n"
    assert run(["keys", "--json"], page()).stdout == "[]\n"


def test_only_the_new_secret_is_on_standard_output(run):
    signed_in()
    said = run(["keys", "create", "ci"], httpx2.Response(201, json={"id": 5, "secret": "sk-mr-new"}))
    assert said.stdout == "sk-mr-new\n"
    assert "not shown again" in said.stderr


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (output.nano_usd(0), "$0.00"),
        (output.nano_usd(12_500_000_000), "$12.50"),
        (output.nano_usd(-1), "-$0.000000001"),
        (output.nano_usd(1_234_567_000_000_001), "$1,234,567.000000001"),
        (output.cents(-1205), "-$12.05"),
        (output.usd("0.0000123"), "$0.0000123"),
        (output.usd("-3"), "-$3.00"),
        (output.usd("-0.50"), "-$0.50"),
        (output.money("-1234.5", "EUR"), "-€1,234.50"),
        (output.money("1234.000", "JPY"), "JPY 1,234"),
        (output.money("0.0042", "JPY"), "JPY 0.0042"),
        (output.money("1.5", "KWD"), "KWD 1.500"),
        (output.cents(-1205, "JPY"), "-JPY 1,205"),
    ],
)
def test_amounts(made, text):
    assert made == text


@pytest.mark.parametrize(
    ("text", "unit", "amount"),
    [("12.5", "money", 12_500_000_000), ("$1,250.00", "money", 1_250_000_000_000), ("1,000", "tokens", 1000)],
)
def test_amount_of_a_budget(text, unit, amount):
    assert budgets._parse(text, unit) == amount


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("x", "money"),
        ("-1", "money"),
        ("1.5", "tokens"),
        ("nan", "money"),
        ("12,50", "money"),
        ("1.0000000001", "money"),
    ],
)
def test_wrong_amount_of_a_budget(text, unit):
    with pytest.raises(click.UsageError, match="is not valid"):
        budgets._parse(text, unit)


# Errors


@pytest.mark.parametrize(
    ("status", "code", "exit_code", "text"),
    [
        (400, "invalid", app.FAILED, "name: Too long."),
        (401, "authentication_failed", app.NOT_ALLOWED, f"Run `{format_command('login')}`"),
        (403, "permission_denied", app.NOT_ALLOWED, "It failed."),
        (403, "reauthentication_required", app.NOT_ALLOWED, "login --operator` again"),
        (404, "not_found", app.NOT_FOUND, "It failed."),
        (429, "throttled", app.TRY_AGAIN, "Try again in 90 s."),
        (503, "unreachable", app.TRY_AGAIN, "It failed."),
        (500, "", app.FAILED, "It failed."),
    ],
)
def test_exit_codes(run, status, code, exit_code, text):
    signed_in()
    problem = {"code": code, "detail": "It failed."} | ({"errors": {"name": ["Too long."]}} if status == 400 else {})
    said = run(["keys", "show", "1"], httpx2.Response(status, json=problem, headers={"Retry-After": "90"}))
    assert said.exit_code == exit_code
    assert said.stderr.startswith("millrace: ")
    assert text in said.stderr
    assert said.stdout == ""


def test_not_signed_in(run):
    said = run(["keys"])
    assert said.exit_code == app.NOT_ALLOWED
    assert f"Run `{format_command('login')}`" in said.stderr


def test_unreachable_server(run, monkeypatch):
    monkeypatch.setenv("MILLRACE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("MILLRACE_API_KEY", "sk-mr-x")

    def refuse(_: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("refused")

    transport = httpx2.MockTransport(refuse)
    monkeypatch.setattr(app, "make_client", lambda c: Client(c.url, c.api_key, max_retries=0, transport=transport))
    said = CliRunner().invoke(cli.root, ["usage"])
    assert (said.exit_code, "Check the URL" in said.stderr) == (app.TRY_AGAIN, True)


def test_a_file_of_deployments_may_have_dates_as_revisions(tmp_path: Path) -> None:
    file = tmp_path / "deployments.yaml"
    file.write_text("- name: llama\n  source: /models/llama\n  revision: 2026-11-23\n  pools: {default: 2}\n")
    (entry,) = _read_file(file)
    assert json.loads(json.dumps(entry)) == {
        "name": "llama",
        "source": "/models/llama",
        "revision": "2026-11-23",
        "pools": {"default": 2},
    }
