"""Security settings that the console and the management API rely on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory

from millrace.conf.middleware import SecurityHeaders

ROOT = Path(__file__).resolve().parents[3]


def policy() -> dict[str, str]:
    header = settings.SECURITY_HEADERS["Content-Security-Policy"]
    return dict(directive.split(" ", 1) for directive in header.split("; "))


def test_scripts_and_styles_are_allowed_only_from_the_platform() -> None:
    assert policy()["default-src"] == "'none'"
    assert policy()["script-src"] == "'self'"
    assert policy()["style-src"] == "'self'"
    assert policy()["frame-ancestors"] == "'none'"
    assert "unsafe" not in " ".join(policy().values())


def test_every_response_has_the_headers_and_a_view_can_override_them(rf: RequestFactory) -> None:
    def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse(headers={"Permissions-Policy": "camera=()"})

    response = SecurityHeaders(view)(rf.get("/"))
    assert response.headers["Content-Security-Policy"] == settings.SECURITY_HEADERS["Content-Security-Policy"]
    assert response.headers["Permissions-Policy"] == "camera=()"


def test_djangos_deployment_check_reports_nothing() -> None:
    environ = os.environ | {
        "MILLRACE_PUBLIC_URL": "https://llm.example.com",
        "MILLRACE_SECRET_KEY": "aB3-" * 20 + "xyz",
    }
    done = subprocess.run(
        [sys.executable, "manage.py", "check", "--deploy", "--fail-level", "WARNING"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environ,
    )
    assert done.returncode == 0, done.stderr


def test_manage_py_names_an_invalid_setting() -> None:
    environ = os.environ | {"MILLRACE_PROT": "1"}
    done = subprocess.run(
        [sys.executable, "manage.py", "check"], capture_output=True, text=True, check=False, cwd=ROOT, env=environ
    )
    assert done.returncode == 1
    assert "MILLRACE_PROT: unknown setting; did you mean MILLRACE_PORT?" in done.stderr
