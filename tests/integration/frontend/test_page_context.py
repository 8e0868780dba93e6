"""View decorators of the console: roles, reauthentication, dialogs, panels and preferences."""

from __future__ import annotations

import re
import time
from html import unescape
from typing import Any

import pytest
from allauth.mfa.totp.internal.auth import TOTP, generate_totp_secret
from django import forms
from django.http import HttpResponse
from django.test import Client
from django.urls import include, path, reverse

from frontend.core import command_palette
from frontend.core.confirmation import Confirm
from frontend.core.form_view import bound_data
from frontend.core.page_context import FORM, PageContext, operator_page, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import redirect_with_message, render_form_errors, render_page, run_action
from frontend.core.screens import OPERATOR, TENANT, ConsoleScreen, SearchResult, sidebar_screens
from frontend.urls import urlpatterns as console
from tenants import actions
from tenants.models import Tenant, User
from tenants.permissions import Permission
from tests.support.frontend.console import PASSWORD, remembered
from tests.support.frontend.totp import current_code

pytestmark = [pytest.mark.django_db, pytest.mark.urls(__name__)]


class Rename(forms.Form):
    name = forms.CharField(max_length=200, help_text="Display name.")


def _fail(ctx: PageContext) -> None:
    raise RuntimeError("secret detail")


PANELS = Panels(
    "trial-panel",
    (
        Panel("fine", "Fine", "frontend/parts/delta.html", lambda ctx: None),
        Panel("broken", "Broken", "frontend/parts/delta.html", _fail),
        Panel("slow", "Slow", "frontend/parts/delta.html", _fail, lazy=True),
        Panel("books", "Books", "frontend/parts/delta.html", _fail, needs=Permission.BILLING_WRITE),
    ),
)


@tenant_page(Permission.KEYS_WRITE, methods=FORM)
def rename(ctx: PageContext) -> HttpResponse:
    form = Rename(bound_data(ctx))
    action = ctx.request.get_full_path()
    shown: dict[str, Any] = {"action": action, "submit": "Rename", "back": ctx.url("overview")}
    if ctx.request.method == "POST":
        if carried := run_action(form, lambda data: actions.do_update_tenant(ctx.tenant, **data)):
            return redirect_with_message(ctx, ctx.url("overview"), f"It is {carried.value.name} now.")
        return render_form_errors(ctx, "frontend/form.html", "Rename", form, **shown)
    return render_page(ctx, "frontend/form.html", "Rename", form=form, **shown)


@tenant_page(Permission.BILLING_WRITE)
def books(ctx: PageContext) -> HttpResponse:
    return render_page(ctx, "frontend/search.html", "Books", panels=PANELS, found=(), typed="")


@tenant_page(Permission.KEYS_WRITE, methods=FORM)
def write_without_form(ctx: PageContext) -> HttpResponse:
    actions.do_update_tenant(ctx.tenant, name="Careless")
    return redirect_with_message(ctx, ctx.url("overview"), "Saved.")


@operator_page(methods=FORM, step_up=True)
def grave(ctx: PageContext) -> HttpResponse:
    return HttpResponse("done")


urlpatterns = [
    path("", include((console, None))),
    path("t/<slug:slug>/rename", rename, name="trial-rename"),
    path("t/<slug:slug>/careless", write_without_form, name="trial-careless"),
    path("t/<slug:slug>/books", books, name="trial-books"),
    path("operator/grave", grave, name="trial-grave"),
    PANELS.tenant_url("t/<slug:slug>/trial/"),
    path("api/docs/", lambda request: HttpResponse(), name="docs"),
]


def join(client: Any, tenant: Tenant, role: str) -> User:
    user = User.objects.create_user(f"{role}@example.com", PASSWORD)
    actions.do_add_member(tenant, user, role)
    client.force_login(user)
    return user


def test_a_role_without_the_permission_is_rejected(client, acme):
    join(client, acme, "developer")
    assert client.get("/t/acme/rename").status_code == 200
    assert client.get("/t/acme/books").status_code == 403


def test_another_method_is_not_allowed(client, acme):
    join(client, acme, "owner")
    assert client.post("/t/acme/books").status_code == 405


def test_operator_pages_return_404_for_others(client, acme):
    join(client, acme, "owner")
    assert client.get("/operator/grave").status_code == 404


def test_a_form_is_submitted_after_reauthentication(client, acme):
    join(client, acme, "owner")
    asked = client.post("/t/acme/rename", {"name": "Acme Two"})
    assert asked.url == "/account/confirm?next=%2Ft%2Facme%2Frename"
    response = client.post(asked.url, {"password": PASSWORD, "next": "/t/acme/rename"})
    assert (response.status_code, response.url) == (302, "/t/acme/rename")
    response = client.get(response.url)
    assert (response.status_code, response.url) == (303, "/t/acme/")
    page = client.get("/t/acme/").content.decode()
    assert "It is Acme Two now." in page
    assert "It is Acme Two now." not in client.get("/t/acme/").content.decode()


def test_a_dialogs_form_asks_for_reauthentication_and_is_sent_again(client, acme):
    user = join(client, acme, "owner")
    headers, sent = {"HX-Request": "true"}, {"name": "Acme Two"}
    client.post("/t/acme/rename", {"name": "Of another page"})  # a suspended form, which must not be processed
    asked = client.post("/t/acme/rename", sent, headers=headers)
    assert (asked.status_code, asked.headers["X-Sign-In"]) == (401, "/account/confirm?next=%2Faccount%2Fsigned-in")
    response = client.post(asked.headers["X-Sign-In"], {"password": PASSWORD, "next": "/account/signed-in"})
    assert (response.status_code, response.url) == (302, "/account/signed-in")
    found = client.get(response.url)
    assert (found.headers["X-Signed-In"], found.json()["user"]) == ("true", user.email)
    assert client.post("/t/acme/rename", sent, headers=headers).headers["HX-Redirect"] == "/t/acme/"
    assert "Of another page" not in client.get("/t/acme/").content.decode()


def test_a_part_of_a_page_asks_to_sign_in(client, acme):
    asked = client.post("/t/acme/rename", {"name": "Acme Two"}, headers={"HX-Request": "true"})
    assert (asked.status_code, asked.headers["X-Sign-In"]) == (401, "/login?next=%2Faccount%2Fsigned-in")
    assert client.get("/account/signed-in").url == "/login?next=/account/signed-in"


def test_a_form_that_waited_is_processed_once_at_its_own_address(client, acme, monkeypatch):
    """A reload there shows the empty form and changes nothing."""
    join(client, acme, "owner")
    asked = client.post("/t/acme/rename", {"name": "Acme Two"})
    assert client.get("/t/acme/rename").status_code == 200  # before the proof it is a form as any other
    back = client.post(asked.url, {"password": PASSWORD, "next": "/t/acme/rename"})
    assert client.get("/t/acme/").status_code == 200
    assert client.get(back.url).status_code == 303
    assert client.get(back.url).status_code == 200
    session = client.session
    session["account_authentication_methods"] = []
    session.save()
    response = client.post("/t/acme/rename", {"name": "Acme Late"})
    back = client.post(response.url, {"password": PASSWORD, "next": "/t/acme/rename"})
    monkeypatch.setattr("frontend.core.suspended_forms._CONFIRMED_SECONDS", -1)
    assert client.get(back.url).status_code == 200  # of a browser that came back much later
    assert "Acme Late" not in client.get("/t/acme/").content.decode()


@pytest.mark.parametrize("totp", [False, True])
def test_a_form_with_a_query_in_its_url_is_submitted_after_reauthentication(client, acme, totp):
    """The values are kept."""
    user, secret = join(client, acme, "owner"), generate_totp_secret()
    if totp:
        TOTP.activate(user, secret)
    here = "/t/acme/rename?whose=key%3A7&more=1"
    response = client.post(here, {"name": "Acme Two"})
    (after,) = re.findall(r'name="next" value="([^"]+)"', client.get(response.url).content.decode())
    proof = {"code": current_code(secret)} if totp else {"password": PASSWORD}
    confirmed = client.post(response.url.partition("?")[0], proof | {"next": unescape(after)})
    assert (confirmed.status_code, confirmed.url) == (302, here)
    assert client.get(confirmed.url).status_code == 303
    assert "It is Acme Two now." in client.get("/t/acme/").content.decode()


def test_an_invalid_form_is_shown_with_its_errors_and_asks_for_no_password(client, acme):
    join(client, acme, "owner")
    long = "Acme, and so on" * 20
    wrong = client.post("/t/acme/rename?more=1", {"name": long})
    page = wrong.content.decode()
    assert wrong.status_code == 422
    assert f'value="{long}"' in page and 'action="/t/acme/rename?more=1"' in page
    assert client.post("/t/acme/rename", {"name": ""}, headers={"HX-Request": "true"}).status_code == 422
    assert client.post("/t/acme/rename", {"name": "Acme Two"}).url.startswith("/account/confirm?")
    assert "Acme Two" not in client.get("/t/acme/").content.decode()


def test_a_view_without_the_validation_of_a_form_writes_nothing_before_the_password(client, acme):
    join(client, acme, "owner")
    assert client.post("/t/acme/careless").url.startswith("/account/confirm?")
    page = client.get("/t/acme/").content.decode()
    assert "Careless" not in page and "Saved." not in page


def test_with_a_recent_reauthentication_a_form_is_submitted_immediately(client, acme):
    join(client, acme, "owner")
    remembered(client.session)
    assert client.post("/t/acme/rename", {"name": "Acme Two"}).status_code == 303
    session = client.session
    session["account_authentication_methods"] = [{"method": "password", "at": time.time() - 3600}]
    session.save()
    assert client.post("/t/acme/rename", {"name": "Acme Three"}).status_code == 302


def test_operators_must_reauthenticate_too(client):
    client.force_login(User.objects.create_superuser("op@example.com", PASSWORD))
    assert client.get("/operator/grave").status_code == 200
    assert client.post("/operator/grave").url.startswith("/account/confirm?")


def test_a_dialog_gets_only_its_content_and_redirects_the_page(client, acme):
    join(client, acme, "owner")
    remembered(client.session)
    headers = {"HX-Request": "true"}
    inside = client.get("/t/acme/rename", headers=headers).content.decode()
    assert "<html" not in inside
    assert 'hx-post="/t/acme/rename"' in inside
    wrong = client.post("/t/acme/rename", {"name": ""}, headers=headers)
    assert wrong.status_code == 422
    assert 'aria-invalid="true"' in wrong.content.decode()
    right = client.post("/t/acme/rename", {"name": "Acme Two"}, headers=headers)
    assert right.headers["HX-Redirect"] == "/t/acme/"


def test_an_actions_error_is_shown_in_the_form():
    form = Rename({"name": "x"})

    def refuse(data: dict[str, Any]) -> None:
        raise actions.Conflict("That name is taken.")

    assert run_action(form, refuse) is None
    assert form.non_field_errors() == ["That name is taken."]


def test_a_confirmation_requires_the_exact_name():
    assert not Confirm("prod", {"typed": "Prod"}).is_valid()
    assert Confirm("prod", {"typed": " prod "}).is_valid()


def test_only_the_failing_panel_shows_an_error_with_the_request_id(client, acme):
    join(client, acme, "owner")
    response = client.get("/t/acme/books")
    assert response.status_code == 200
    shown = response.context["panels"]
    assert (shown["fine"].failed, shown["broken"].failed, shown["slow"].body) == (False, True, None)
    failed = client.get("/t/acme/trial/panels/broken?range=7d")
    assert (failed.status_code, failed.headers["X-Panel"]) == (500, "broken")
    text = failed.content.decode()
    assert failed.headers["x-request-id"] in text
    assert 'hx-get="/t/acme/trial/panels/broken?range=7d"' in text
    assert "secret detail" not in text
    assert client.get("/t/acme/trial/panels/fine").status_code == 200
    assert client.get("/t/acme/trial/panels/none-such").status_code == 404


def test_a_panel_without_permission_is_not_shown(client, acme):
    join(client, acme, "readonly")
    assert client.get("/t/acme/trial/panels/books").status_code == 404


def test_preferences_are_stored_and_redirect_back(client, acme):
    join(client, acme, "owner")
    given = {"theme": "dark", "zone": "Europe/Berlin", "letters": "off", "other": "x"}
    response = client.post("/preferences", given, headers={"referer": "http://testserver/t/acme/?range=7d"})
    assert response.url == "/t/acme/?range=7d"
    assert {name: morsel.value for name, morsel in response.cookies.items()} == {
        "theme": "dark",
        "zone": "Europe/Berlin",
        "letters": "off",
    }
    page = client.get("/t/acme/").content.decode()
    assert '<html lang="en" data-theme="dark">' in page
    assert "data-letters" not in page
    assert "Europe/Berlin" in page


@pytest.mark.parametrize(
    "given", [{"theme": "pink"}, {"zone": "../../etc/passwd"}, {"zone": "Nowhere"}, {"letters": ""}]
)
def test_invalid_preferences_are_not_stored(client, given):
    response = client.post("/preferences", given, headers={"referer": "http://elsewhere.example/x"})
    assert response.url == "/"
    assert not response.cookies


def test_the_palette_finds_screens_and_objects(client, acme, monkeypatch):
    join(client, acme, "owner")
    finders = {"Things": lambda ctx, typed: [SearchResult(f"a {typed}", "/x", "keys")]}
    things = ConsoleScreen("overview", "Things", finders=finders)
    with monkeypatch.context() as patch:
        patch.setattr(command_palette, "screens_of", lambda ctx: (*sidebar_screens(TENANT), things))
        found = client.get("/t/acme/search?q=over", headers={"HX-Request": "true"}).content.decode()
        assert "a over" in client.get("/t/acme/search?q=over").content.decode()
    assert 'href="/t/acme/"' in found
    assert "a over" in found
    assert "<html" not in found
    assert "No results for" in client.get("/t/acme/search?q=zzz").content.decode()


def test_operators_find_tenants(client, acme):
    client.force_login(User.objects.create_superuser("op@example.com"))
    assert f"/operator/tenants/{acme.pk}/" in client.get("/operator/search?q=acm").content.decode()


def test_a_member_of_two_tenants_can_switch(client, acme):
    user = join(client, acme, "owner")
    other = actions.do_create_tenant("lab", "Lab")
    actions.do_add_member(other, user, "readonly")
    actions.do_create_tenant("third", "Third")
    page = client.get("/t/acme/").content.decode()
    assert 'href="/t/lab/"' in page
    assert "/t/third/" not in page


def more(client: Client, address: str) -> dict[str, str]:
    """The links below "More", by label."""
    return {link.label: link.url for link in client.get(address).context["layout"].more}


def test_all_organizations_are_a_link_for_members_of_several(client, acme):
    """Home redirects a member of one tenant to that tenant."""
    user = join(client, acme, "owner")
    assert "All organizations" not in more(client, "/t/acme/")
    (section,) = client.get("/account/").context["layout"].sections
    assert [(link.label, link.url) for link in section.links] == [("Acme", "/t/acme/")]
    actions.do_add_member(actions.do_create_tenant("lab", "Lab"), user, "readonly")
    assert more(client, "/t/acme/")["All organizations"] == "/"
    page = client.get("/")
    assert [tenant.slug for tenant in page.context["tenants"]] == ["acme", "lab"]
    for address in ("/", "/account/"):
        (section,) = client.get(address).context["layout"].sections
        assert [(link.label, link.url) for link in section.links] == [("All organizations", "/")]


def test_all_tenants_are_a_link_for_operators_outside_their_console(client, acme):
    operator = User.objects.create_superuser("op@example.com")
    client.force_login(operator)
    assert list(more(client, "/operator/tenants/")) == ["API reference"]  # the sidebar has Tenants
    (section,) = client.get("/account/").context["layout"].sections
    assert [link.url for link in section.links] == ["/operator/tenants/"]
    client.post(f"/operator/tenants/{acme.pk}/view", {"reason": "ticket 12"})
    assert more(client, "/t/acme/")["All tenants"] == "/operator/tenants/"


@pytest.mark.urls("tests.support.frontend.admin_urls")
@pytest.mark.parametrize(("package", "arguments"), [(TENANT, ["acme"]), (OPERATOR, [])])
def test_every_screen_of_the_sidebar_is_a_page(package, arguments):
    screens = sidebar_screens(package)
    assert {screen.route for screen in screens if not reverse(screen.route, args=arguments)} == set()
    assert (
        len({screen.letter for screen in screens}) == len({(one.group, one.order) for one in screens}) == len(screens)
    )


def test_the_sidebar_has_the_screens_of_the_role(client, acme):
    join(client, acme, "readonly")
    sections = client.get("/t/acme/").context["layout"].sections
    labels = {link.label for section in sections for link in section.links}
    assert "Overview" in labels
    assert "Audit log" not in labels
    assert [link.label for section in sections for link in section.links if link.current] == ["Overview"]


def test_panels_are_built_in_separate_scopes(client, acme, monkeypatch):
    """A panel with a failing query does not affect the next panel's transaction."""
    from django.db import connection

    def spoil(ctx: PageContext) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT nothing_there")

    def count(ctx: PageContext) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")

    join(client, acme, "owner")
    builds = {"a": spoil, "b": count}
    made = {name: Panel(name, name, "frontend/parts/delta.html", build) for name, build in builds.items()}
    monkeypatch.setattr(PANELS, "_panels", made)
    shown = client.get("/t/acme/books").context["panels"]
    assert (shown["a"].failed, shown["b"].failed) == (True, False)
