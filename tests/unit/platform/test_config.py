from __future__ import annotations

from pathlib import Path

import pytest

from inference_worker.contract.env import SettingsError, load, read_all
from inference_worker.contract.settings import worker_settings
from millrace.environment import configuration

GOOD = {
    "MILLRACE_DATABASE_URL": "postgresql://u:p@db.example.com:5433/millrace?sslmode=require",
    "MILLRACE_VALKEY_URL": "redis://127.0.0.1:6379/0",
    "MILLRACE_SECRET_KEY": "s" * 32,
    "MILLRACE_PREFIX_CACHE_SECRET": "c" * 32,
    "MILLRACE_KEY_PEPPERS": "p" * 32,
    "MILLRACE_WORKER_SECRET": "w" * 32,
}


def check_settings(environ: dict[str, str]) -> None:
    read_all(environ, *configuration.SETTINGS_CLASSES)


def test_unset_variables_have_defaults() -> None:
    settings = load(configuration.PlatformSettings, GOOD)
    assert (settings.host, settings.port, settings.debug) == ("127.0.0.1", 8000, False)
    assert settings.allowed_hosts == ("localhost", "127.0.0.1", "[::1]")
    assert settings.max_request_body_bytes == 2 * 2**20
    assert settings.base_url == "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MILLRACE_DATABASE_URL", "mysql://u@h/db"),
        ("MILLRACE_DATABASE_URL", "postgresql://u:p@host"),
        ("MILLRACE_DATABASE_URL", "postgresql://u:p@host:port/db"),
        ("MILLRACE_VALKEY_URL", "amqp://localhost"),
        ("MILLRACE_SECRET_KEY", "short"),
        ("MILLRACE_PREFIX_CACHE_SECRET", ""),
        ("MILLRACE_KEY_PEPPERS", ""),
        ("MILLRACE_WORKER_SECRET", ""),
        ("MILLRACE_KEY_PEPPERS", "p" * 32 + ",short"),
        ("MILLRACE_MIGRATION_DATABASE_URL", "owner"),
        ("MILLRACE_EMAIL_URL", "http://mail.example.com"),
        ("MILLRACE_REQUIRE_OPERATOR_TOTP", "maybe"),
        ("MILLRACE_PORT", "0"),
        ("MILLRACE_PORT", "http"),
        ("MILLRACE_DEBUG", "maybe"),
        ("MILLRACE_PUBLIC_URL", "example.com"),
        ("MILLRACE_MAX_REQUEST_BODY_BYTES", "lots"),
        ("MILLRACE_QUEUE_TIMEOUT_SECONDS", "0"),
        ("MILLRACE_MODELS", "nameless"),
        ("MILLRACE_LOG_LEVEL", "loud"),
        ("MILLRACE_DEVICE", "tpu"),
    ],
)
def test_an_error_names_the_invalid_value(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}: .*(is not valid|required)"):
        check_settings(GOOD | {name: value})


@pytest.mark.parametrize(
    "issuer",
    [
        *("https://id.example.com", "https://id.example.com:8443/realms/x", "http://localhost:8080/realms/x"),
        *(
            "http://127.0.0.1:1",
            "http://127.9.9.9",
            "http://[::1]:8080/a",
            "https://10.0.0.7",
            "https://id.example.com/",
        ),
    ],
)
def test_an_issuer_is_reached_by_tls_or_on_this_machine(issuer: str) -> None:
    settings = load(configuration.PlatformSettings, GOOD | {"MILLRACE_OIDC_ISSUER": issuer})
    assert settings.oidc_issuer == issuer.rstrip("/")


@pytest.mark.parametrize(
    "issuer",
    [
        *("http://id.example.com", "http://10.0.0.7", "http://0.0.0.0", "http://localhost.example.com", "http://[::2]"),
        *(
            "http://127.0.0.1.example.com",
            "http://localhost@id.example.com",
            "https://",
            "https://x:port",
            "id.example.com",
        ),
        *(
            "ftp://id.example.com",
            "https://id.example.com?x=1",
            "https://id.example.com#x",
            "https://u:p@id.example.com",
        ),
        *(
            "https://id.example.com/.well-known/openid-configuration",
            "http://[fe80::1]",
            "https://[::1",
            "http://2130706433",
        ),
    ],
)
def test_another_issuer_is_a_clear_error(issuer: str) -> None:
    with pytest.raises(SettingsError, match="MILLRACE_OIDC_ISSUER"):
        load(configuration.PlatformSettings, GOOD | {"MILLRACE_OIDC_ISSUER": issuer})


def test_one_error_names_every_problem_and_no_secret() -> None:
    wrong = {"MILLRACE_PORT": "x", "MILLRACE_DEVICE": "y", "MILLRACE_SECRET_KEY": "do-not-tell"}
    with pytest.raises(SettingsError) as exc_info:
        check_settings(GOOD | wrong)
    assert all(name in str(exc_info.value) for name in wrong)
    assert "do-not-tell" not in str(exc_info.value)


@pytest.mark.parametrize("name", sorted(GOOD))
def test_variables_without_a_default_are_required(name: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}: is required"):
        check_settings({other: value for other, value in GOOD.items() if other != name})


def test_an_unknown_name_is_rejected_with_the_most_similar_known_one() -> None:
    with pytest.raises(SettingsError, match=r"MILLRACE_PROT: unknown setting; did you mean MILLRACE_PORT\?"):
        configuration.reject_unknown({"MILLRACE_PROT": "1"})
    with pytest.raises(SettingsError, match=r"MILLRACE_XYZZY: unknown setting$"):
        configuration.reject_unknown({"MILLRACE_XYZZY": "1"})
    with pytest.raises(SettingsError, match="MILLRACE_KV_CACHE_BYTES: is now MILLRACE_KV_CACHE_MEMORY"):
        configuration.reject_unknown({"MILLRACE_KV_CACHE_BYTES": "1"})
    configuration.reject_unknown({"MILLRACE_PORT": "1", "MILLRACE_SECRET_KEY_FILE": "/x", "OTHER": "1"})
    configuration.reject_unknown({"MILLRACE_API_KEY": "sk-mr-1", "MILLRACE_URL": "http://127.0.0.1:8000"})


def test_a_value_can_be_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("f" * 40 + "\n")
    environ = {name: value for name, value in GOOD.items() if name != "MILLRACE_SECRET_KEY"}
    settings = load(configuration.PlatformSettings, environ | {"MILLRACE_SECRET_KEY_FILE": str(path)})
    assert settings.secret_key == "f" * 40
    with pytest.raises(SettingsError, match=r"MILLRACE_SECRET_KEY: .*No such file"):
        load(configuration.PlatformSettings, environ | {"MILLRACE_SECRET_KEY_FILE": str(tmp_path / "none")})


def test_the_state_directorys_file_sets_variables_that_the_environment_lacks(tmp_path: Path) -> None:
    (tmp_path / "env").write_text("# a note\n\nMILLRACE_PORT=9000\nMILLRACE_SECRET_KEY=a=b\nMILLRACE_HOST=::1\n")
    place = {"MILLRACE_DATA_DIR": str(tmp_path)}
    assert configuration.effective_environ(place)["MILLRACE_SECRET_KEY"] == "a=b"
    mine = configuration.effective_environ(place | {"MILLRACE_PORT": "1", "MILLRACE_SECRET_KEY_FILE": "/elsewhere"})
    assert mine["MILLRACE_PORT"] == "1"
    assert mine["MILLRACE_HOST"] == "::1"
    assert "MILLRACE_SECRET_KEY" not in mine  # a file that the environment names also takes precedence


def test_a_database_url_becomes_djangos_parameters() -> None:
    assert configuration.database_parameters("postgresql://a%40b:p%2Fq@[::1]:5433/m%20r?sslmode=require") == {
        "NAME": "m r",
        "USER": "a@b",
        "PASSWORD": "p/q",
        "HOST": "::1",
        "PORT": "5433",
        "OPTIONS": {"sslmode": "require"},
    }


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("smtp://mail.example.com", ("mail.example.com", 587, "", "", False, False)),
        ("smtp://a%40b:p%2Fq@mail.example.com:2525", ("mail.example.com", 2525, "a@b", "p/q", False, True)),
        ("smtps://a:b@[::1]", ("::1", 465, "a", "b", True, False)),
    ],
)
def test_a_mail_servers_url_is_parsed(url: str, server: tuple[str, int, str, str, bool, bool]) -> None:
    assert configuration.parse_mail_server(url) == server


@pytest.mark.parametrize(
    ("host", "public", "url"),
    [
        ("0.0.0.0", "", "http://127.0.0.1:8000"),  # noqa: S104  (a setting's value; nothing is bound)
        ("::", "", "http://[::1]:8000"),
        ("gateway", "", "http://gateway:8000"),
        ("127.0.0.1", "https://llm.example.com/", "https://llm.example.com"),
    ],
)
def test_the_base_url_can_be_used_by_clients(host: str, public: str, url: str) -> None:
    settings = load(configuration.PlatformSettings, GOOD | {"MILLRACE_HOST": host, "MILLRACE_PUBLIC_URL": public})
    assert settings.base_url == url


def test_a_worker_rejects_the_earlier_name_of_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_KV_CACHE_BYTES", "1")
    with pytest.raises(SettingsError, match="MILLRACE_KV_CACHE_BYTES: is now MILLRACE_KV_CACHE_MEMORY"):
        worker_settings.__wrapped__()
