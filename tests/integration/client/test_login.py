"""`millrace login` against the platform's pages: with a password, with a second factor, and its failures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx2
import pytest
from allauth.mfa.recovery_codes.internal.auth import RecoveryCodes
from allauth.mfa.totp.internal.auth import TOTP, generate_totp_secret
from click.testing import CliRunner, Result

from billing.invoicing.setup import do_set_profile
from billing.models import BillingProfile
from billing.payments.stripe_api import HostedPage
from millrace import cli
from millrace.cli.profiles import Connection, changed_profiles, config_path, read_profiles
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import User
from tests.support.code_blocks import ROOT, blocks_of

PASSWORD = "correct horse battery staple"


@pytest.fixture(autouse=True)
def _environment(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("MILLRACE_URL", "MILLRACE_API_KEY", "MILLRACE_PROFILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def log_in(table, served) -> Callable[..., Result]:
    """Return a function that runs `millrace login --operator` with these answers."""

    def log_in(*answers: str) -> Result:
        return CliRunner().invoke(cli.root, ["login", "--operator", "--url", served], input="\n".join(answers) + "\n")

    return log_in


@pytest.fixture
def operator(table) -> User:
    return User.objects.create_superuser("op@example.com", PASSWORD)


def run(*line: str) -> Result:
    return CliRunner().invoke(cli.root, list(line))


def test_operator_signs_in_and_changes_something(operator, log_in):
    said = log_in(operator.email, PASSWORD)
    assert said.exit_code == 0, said.output
    assert PASSWORD not in said.output
    assert read_profiles(config_path()).profiles["default"].who == "operator op@example.com"
    assert run("tenants").exit_code == 0
    made = run("tenants", "create", "beta")
    assert made.exit_code == 0, made.output


def test_documented_payments_of_an_operator(operator, log_in, furnished_acme, monkeypatch, capsys):
    started: list[object] = []

    def start(*arguments: object, **_: object) -> HostedPage:
        started.append(arguments[0])
        return HostedPage("1", "https://pay.example/1")

    monkeypatch.setattr("billing.api.money.do_start_top_up", start)
    monkeypatch.setattr("billing.api.money.do_start_payment", start)
    monkeypatch.setattr("billing.api.money.InvoicePayment.find", lambda _view, _model, pk: pk)
    do_set_profile(furnished_acme.tenant)
    with all_tenants_scope(BypassReason.OPERATOR):
        BillingProfile.objects.for_tenant(furnished_acme.tenant).update(payment_customer="cus_1", payment_method="pm_1")
    page = (ROOT / "docs/reference/invoices.md").read_text(encoding="utf-8")
    blocks = [block.code for block in blocks_of(page) if block.language == "python" and "session" in block.marks]
    assert log_in(operator.email, PASSWORD).exit_code == 0
    code = "".join(blocks).replace("set_prepaid(7", f"set_prepaid({furnished_acme.tenant.pk}")
    exec(compile(code, "invoices.md", "exec"), {})  # noqa: S102
    assert started == [furnished_acme.tenant, 42]
    assert capsys.readouterr().out == "https://pay.example/1\n" * 2
    with all_tenants_scope(BypassReason.OPERATOR):
        profile = BillingProfile.objects.for_tenant(furnished_acme.tenant).get()
    assert (profile.top_up_below, profile.top_up_cents, profile.is_prepaid) == (1000, 5000, True)


def test_the_page_of_the_api_sends_requests_with_the_session(operator, served):
    with httpx2.Client(base_url=served) as browser:
        assert "X-CSRFTOKEN" in browser.get("/api/docs/", params={"script": ""}).text.upper()


def test_logout_ends_the_session(operator, log_in):
    log_in(operator.email, PASSWORD)
    connection = read_profiles(config_path()).profiles["default"]
    said = run("logout")
    assert (said.exit_code, said.output) == (0, "Removed the profile default.\n")
    assert read_profiles(config_path()).profiles == {}
    with changed_profiles(config_path()) as stored:
        stored.profiles["default"] = connection  # a copy of the credentials
    assert run("tenants").exit_code == 3
    assert run("logout").exit_code == 0  # the session has ended already


def test_logout_does_not_accept_the_redirect_of_a_proxy():
    class Proxy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(302)
            self.send_header("Location", "https://sso.example.com/")
            self.end_headers()

    server = HTTPServer(("127.0.0.1", 0), Proxy)
    thread = threading.Thread(target=server.handle_request, daemon=True)
    thread.start()
    with changed_profiles(config_path()) as stored:
        url = f"http://127.0.0.1:{server.server_port}"
        stored.profiles["default"] = Connection(url, cookies={"sessionid": "x"})
    said = run("logout")
    thread.join()
    server.server_close()
    assert (said.exit_code, "was not ended" in said.output) == (1, True)
    assert "default" in read_profiles(config_path()).profiles


def test_logout_keeps_a_connection_that_was_stored_meanwhile(monkeypatch):
    old, new = (Connection("http://127.0.0.1:9", cookies={"sessionid": session}) for session in ("old", "new"))
    with changed_profiles(config_path()) as stored:
        stored.profiles["default"] = old

    def log_in_elsewhere(connection: Connection) -> None:
        assert connection == old
        with changed_profiles(config_path()) as stored:
            stored.profiles["default"] = new

    monkeypatch.setattr("millrace.cli.login._end_session", log_in_elsewhere)
    assert run("logout").exit_code == 1
    assert read_profiles(config_path()).profiles == {"default": new}


def test_logout_of_a_server_that_does_not_respond(operator, log_in, served):
    log_in(operator.email, PASSWORD)
    with changed_profiles(config_path()) as stored:
        stored.profiles["default"] = replace(stored.profiles["default"], url="http://127.0.0.1:9")
    said = run("logout")
    assert (said.exit_code, "millrace logout --local" in said.output) == (5, True)
    assert "default" in read_profiles(config_path()).profiles
    assert run("logout", "--local").exit_code == 0
    assert read_profiles(config_path()).profiles == {}


def test_second_factor(operator, log_in):
    TOTP.activate(operator, generate_totp_secret())
    code = RecoveryCodes.activate(operator).get_unused_codes()[0]
    wrong = log_in(operator.email, PASSWORD, "000000")
    assert (wrong.exit_code, "The code is wrong" in wrong.output) == (3, True)
    said = log_in(operator.email, PASSWORD, code)
    assert said.exit_code == 0, said.output
    assert run("tenants").exit_code == 0


def test_wrong_password(operator, log_in):
    said = log_in(operator.email, "wrong")
    assert (said.exit_code, "do not match" in said.output) == (3, True)
    assert read_profiles(config_path()).profiles == {}


def test_user_who_is_not_an_operator(table, log_in):
    user = User.objects.create_user("dev@example.com", PASSWORD)
    said = log_in(user.email, PASSWORD)
    assert (said.exit_code, "is not an operator" in said.output) == (3, True)
    assert read_profiles(config_path()).profiles == {}


def test_health_of_a_server_without_a_gateway(table, served, monkeypatch):
    monkeypatch.setenv("MILLRACE_URL", served)
    monkeypatch.setenv("MILLRACE_API_KEY", "sk-mr-x")
    said = run("health")
    assert (said.exit_code, "does not respond" in said.output) == (5, True)
