"""Every setting of allauth has the value and the reason that its reference page states."""

from __future__ import annotations

import re
import warnings
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

from allauth import app_settings as common
from allauth.account import app_settings as account
from allauth.mfa import app_settings as mfa
from allauth.socialaccount import app_settings as social
from allauth.usersessions import app_settings as sessions
from django.conf import settings
from django.test import override_settings

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "sign-in-settings.md"
GROUPS = [module._app_settings for module in (common, account, social, mfa, sessions)]
PREFIXES = ("ALLAUTH_", "ACCOUNT_", "SOCIALACCOUNT_", "MFA_", "USERSESSIONS_", "HEADLESS_")
# allauth computes them from other settings, and warns that they are deprecated.
DEPRECATED = {
    *("ACCOUNT_AUTHENTICATION_METHOD", "ACCOUNT_EMAIL_REQUIRED", "ACCOUNT_USERNAME_REQUIRED"),
    *("ACCOUNT_SIGNUP_EMAIL_ENTER_TWICE", "ACCOUNT_SIGNUP_PASSWORD_ENTER_TWICE", "ACCOUNT_SESSION_COOKIE_AGE"),
    "SOCIALACCOUNT_EMAIL_REQUIRED",
}


def written(value: Any) -> str:
    """Return a value as the page shows it. Of a dictionary, these are its keys."""
    match value:
        case Enum():
            return str(value.value)
        case type():
            return value.__name__
        case timedelta():
            return f"{value.total_seconds():.0f} s"
        case dict() | set() | frozenset() | list():
            return ", ".join(sorted(written(each) for each in value)) or "none"
    return str(value) if value not in (None, "") else "none"


def effective() -> dict[str, tuple[str, str]]:
    """Return the value of each setting of allauth, and who sets it."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for group in GROUPS:
            for name in sorted(vars(type(group))):
                if isinstance(getattr(type(group), name), property) and group.prefix + name not in DEPRECATED:
                    source = "project" if hasattr(settings, group.prefix + name) else "allauth"
                    found[group.prefix + name] = written(getattr(group, name)), source
    return found


def limits() -> dict[str, str]:
    """Return the limits that allauth would apply without the platform's settings."""
    with override_settings(ACCOUNT_RATE_LIMITS={}, MFA_RATE_LIMITS={}):
        return {action: limit or "" for action, limit in sorted((account.RATE_LIMITS | mfa.RATE_LIMITS).items())}


def rows_of(columns: int) -> dict[str, list[str]]:
    """Return the cells of the page's table with this number of columns, by setting or action."""
    found = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `") and len(cells) == columns:
            found[cells[0].strip("`")] = [re.sub(r"^`(.*)`$", r"\1", cell) for cell in cells[1:]]
    return found


def test_each_setting_has_the_stated_value() -> None:
    rows = rows_of(4)
    assert {name: (value, source) for name, (value, source, _) in rows.items()} == effective()
    assert [name for name, cells in rows.items() if len(cells[2]) < 10] == []


def test_each_setting_of_the_project_is_one_of_allauth() -> None:
    ours = {name for name in dir(settings) if name.startswith(PREFIXES)}
    assert ours - set(effective()) == set()


def test_each_limit_of_allauth_is_stated_and_off() -> None:
    rows = rows_of(3)
    assert {action: "" if limit == "none" else limit for action, (limit, _) in rows.items()} == limits()
    assert account.RATE_LIMITS == mfa.RATE_LIMITS == {}


def test_a_changed_default_is_noticed() -> None:
    with override_settings(ACCOUNT_LOGIN_ON_PASSWORD_RESET=True, MFA_TOTP_TOLERANCE=2):
        stated = {name: (value, source) for name, (value, source, _) in rows_of(4).items()}
        changed = {name for name, found in effective().items() if stated[name] != found}
    assert changed == {"ACCOUNT_LOGIN_ON_PASSWORD_RESET", "MFA_TOTP_TOLERANCE"}
