"""A package of a screen is found everywhere: URLs, sidebar, shortcuts, command palette, and the lists of the tests."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from django.http import HttpResponse
from django.urls import include, path, reverse

import frontend.tenant
import frontend.urls
from frontend.core import screens
from frontend.core.screens import OPERATOR, TENANT, sidebar_screens
from tenants import actions
from tenants.models import User
from tests.support.frontend.console import load_screens
from tests.support.frontend.gallery import gallery
from tests.support.frontend.make_screenshots import has_screenshots

VIEWS = """
from django.urls import path

from frontend.core.page_context import tenant_page
from frontend.core.rendering import render_page
from frontend.core.screens import ConsoleScreen, PaletteAction, SearchResult
from tenants.permissions import Permission


@tenant_page(Permission.KEYS_READ)
def lamps(ctx):
    return render_page(ctx, "frontend/shortcuts.html", "Lamps", links=())


def find(ctx, typed):
    yield SearchResult(f"Lamp {typed}", "/lamp", "keys")


SCREEN = ConsoleScreen(
    "lamps",
    "Lamps",
    icon="keys",
    letter="y",
    group="build",
    order=15,
    needs=Permission.KEYS_READ,
    actions=(PaletteAction("Light a lamp", "lamps-new", "plus", Permission.KEYS_WRITE),),
    finders={"Lamps": find},
)
urlpatterns = [
    path("t/<slug:slug>/lamps/", lamps, name="lamps"),
    path("t/<slug:slug>/lamps/new", lamps, name="lamps-new"),
]
"""


def _discover() -> list[Any]:
    """Discover the screens again and return the console's URL patterns."""
    screens._views_of_screens.cache_clear()
    screens.sidebar_screens.cache_clear()
    return importlib.reload(frontend.urls).urlpatterns


@pytest.fixture
def lamps(tmp_path: Path, settings: Any) -> Iterator[None]:
    """A screen whose only declaration is its package."""
    package = tmp_path / "lamps"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "views.py").write_text(VIEWS)
    urls = ModuleType("urls_with_lamps")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frontend.tenant, "__path__", [*frontend.tenant.__path__, str(tmp_path)])
        patch.setitem(sys.modules, urls.__name__, urls)
        docs = path("api/docs/", lambda request: HttpResponse(), name="docs")
        urls.urlpatterns = [path("", include((_discover(), None))), docs]  # type: ignore[attr-defined]
        settings.ROOT_URLCONF = urls.__name__
        yield
    for name in ("frontend.tenant.lamps.views", "frontend.tenant.lamps"):
        del sys.modules[name]
    del frontend.tenant.lamps
    _discover()


@pytest.mark.django_db
@pytest.mark.usefixtures("lamps")
def test_a_package_of_a_screen_is_found_everywhere(client, acme):
    user = User.objects.create_user("owner@example.com")
    actions.do_add_member(acme, user, "owner")
    client.force_login(user)

    page = client.get("/t/acme/lamps/")
    assert page.status_code == 200
    build = next(section for section in page.context["layout"].sections if section.label == "Build")
    assert [link.label for link in build.links[:3]] == ["API keys", "Lamps", "Projects"]
    assert [link.label for section in page.context["layout"].sections for link in section.links if link.current] == [
        "Lamps"
    ]
    assert 'data-letter="y"' in page.content.decode()
    assert "Lamps" in client.get("/t/acme/shortcuts").content.decode()

    found = client.get("/t/acme/search?q=lamp").context["found"]
    assert [(group.kind, [hit.label for hit in group.hits]) for group in found] == [
        ("Pages", ["Lamps"]),
        ("Actions", ["Light a lamp"]),
        ("Lamps", ["Lamp lamp"]),
    ]
    assert has_screenshots("lamps")
    pictures = gallery({"keys", "lamps", "projects"})
    assert pictures.index("### Keys") < pictures.index("### Lamps") < pictures.index("### Projects")


@pytest.mark.django_db
@pytest.mark.usefixtures("lamps")
def test_a_screen_without_the_permission_is_not_found(client, acme):
    user = User.objects.create_user("billing@example.com")
    actions.do_add_member(acme, user, "billing")
    client.force_login(user)
    assert client.get("/t/acme/search?q=lamp").context["found"] == ()


@pytest.mark.parametrize(("package", "arguments"), [(TENANT, ["acme"]), (OPERATOR, [])])
def test_every_screen_has_a_url_and_is_registered_for_the_tests(package, arguments):
    declared = [views.SCREEN.route for views in screens._views_of_screens(package)]
    assert len(declared) == len(set(declared)) > 10
    assert all(reverse(route, args=arguments) for route in declared)
    assert {screen.route for screen in sidebar_screens(package)} - {"admin:index"} <= set(declared)
    assert set(declared) <= {screen.name for screen in load_screens()}, "add it to tests/support/frontend/screens"
