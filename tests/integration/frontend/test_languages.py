"""The language of the console: the choice, dates, numbers and money; the API stays in English."""

from __future__ import annotations

import re
from datetime import date
from typing import Any

import pytest
from django.utils import translation

from frontend.core import numbers
from frontend.core.languages import day_text
from frontend.core.numbers import Money
from millrace.apps.health.health_checks import record_issues
from millrace.apps.health.models import HealthEvent
from tenants import actions
from tenants.actions import webhooks
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Membership, User
from tests.support.frontend.console import remembered
from tests.support.rows import unscoped

pytestmark = [pytest.mark.django_db, pytest.mark.acme(signed_in="owner")]
GERMAN = {"accept-language": "de-AT,de;q=0.9,en;q=0.5"}


def page(client: Any, path: str = "/t/acme/", **headers: Any) -> str:
    response = client.get(path, headers=headers)
    assert response.status_code == 200
    return str(response.content.decode())


def test_the_browser_s_language_is_used_until_the_user_chooses_one(client, acme):
    assert '<html lang="en"' in page(client)
    german = page(client, **GERMAN)
    assert '<html lang="de"' in german
    assert "Senden Sie Ihre erste Anfrage" in german and "Übersicht" in german
    assert '<html lang="en"' in page(client, **{"accept-language": "fr, x;q=nonsense"})

    client.post("/preferences", {"language": "en"})
    assert '<html lang="en"' in page(client, **GERMAN)
    client.post("/preferences", {"language": "tlh"})
    assert '<html lang="en"' in page(client, **GERMAN)
    client.post("/preferences", {"language": "de"})
    assert "Übersicht" in page(client)


def test_errors_of_forms_are_translated_and_those_of_the_api_are_not(client, acme):
    client.post("/preferences", {"language": "de"})
    response = client.post("/account/", {"name": ""}, headers=GERMAN)
    assert "Dieses Feld ist zwingend erforderlich." in response.content.decode()
    response = client.post("/api/projects", {}, content_type="application/json", headers=GERMAN)
    assert response.status_code in (400, 403, 404)
    assert "erforderlich" not in response.content.decode()


def test_rejections_are_translated_on_pages_and_not_in_the_api(client, acme):
    client.post("/preferences", {"language": "de"})
    remembered(client.session)
    sent = {"name": "x", "query": f"q={3000 * 'x'}"}
    response = client.post("/t/acme/keys/views/save", sent, follow=True)
    assert "Diese Filter sind zu lang, um gespeichert zu werden." in response.content.decode()
    response = client.post("/t/acme/members/leave", {"typed": "acme"})
    assert "Mindestens ein Inhaber ist nötig." in response.content.decode()
    with pytest.raises(actions.ActionRefused, match="At least one owner is required"):
        actions.do_remove_member(unscoped(Membership).get(tenant=acme))


def test_health_issues_and_webhook_events_are_translated(client, acme):
    assert "Rechnung vollständig bezahlt" in page(client, "/t/acme/webhooks/new", **GERMAN)
    endpoint = webhooks.do_create_endpoint(acme, "https://example.com/hook")[0]
    webhooks.do_disable_endpoint(endpoint, because="The endpoint responded with 410 Gone.")
    assert "Der Endpunkt antwortete mit 410 Gone." in page(client, f"/t/acme/webhooks/{endpoint.pk}/", **GERMAN)
    client.force_login(User.objects.create_superuser("operator@example.com"))
    german = page(client, "/operator/", **GERMAN)
    assert "Der Webhook https://example.com/hook wurde deaktiviert" in german
    assert "Der Endpunkt antwortete mit 410 Gone." in german
    assert "The webhook" not in german
    record_issues(None)
    assert "Der Webhook https://example.com/hook wurde deaktiviert" in page(client, "/operator/alerts/", **GERMAN)
    with all_tenants_scope(BypassReason.COMMAND):
        titles = set(HealthEvent.objects.values_list("title", flat=True))
    assert "Acme: the webhook https://example.com/hook was disabled" in titles


def test_scripts_have_the_texts_of_the_language(client, acme):
    assert "texts." not in page(client)
    german = page(client, **GERMAN)
    (url,) = re.findall(r'src="([^"]+texts\.de[^"]*\.js)"', german)
    assert german.index(url) < german.index("frontend/console.js")


@pytest.mark.parametrize(
    ("language", "amount", "small", "count", "day", "part", "time"),
    [
        ("en", "$1,234.56", "$0.0042", "12,510,000", "24 Nov 2026", "60.4%", "2.31 s"),
        (
            "de",
            "1.234,56\N{NO-BREAK SPACE}$",
            "0,0042\N{NO-BREAK SPACE}$",
            "12.510.000",
            "24. Nov 2026",
            "60,4%",
            "2,31 s",
        ),
    ],
)
def test_numbers_money_and_dates_have_the_format_of_the_language(language, amount, small, count, day, part, time):
    with translation.override(language):
        assert Money.cents(123_456).text == amount
        assert Money(42 * 10**11).text == small
        assert numbers.exact(12_510_000) == count
        assert numbers.share(604, 1000) == part
        assert numbers.duration(2_310_000) == time
        assert day_text(date(2026, 11, 24)) == day


def test_drawings_have_points_in_every_language(client, acme):
    with translation.override("de"):
        from django.template import Context, Template

        assert Template('<rect width="{{ w }}%"/>').render(Context({"w": 12.5})) == '<rect width="12.5%"/>'


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/t/acme/settings/", "Datenaufbewahrung"),
        ("/t/acme/routing/", "Noch keine Aliasse"),
        ("/t/acme/experiments/", "Noch keine Experimente"),
        ("/t/acme/keys/", "Ansicht speichern"),
        ("/operator/", "Erfordert Aufmerksamkeit"),
        ("/operator/deployments/", "Deployment hinzufügen"),
        ("/operator/tenants/", "Mandant anlegen"),
        ("/operator/prices/", "Neuer Entwurf"),
        ("/operator/reratings/", "Noch keine Nachberechnungen"),
        ("/operator/billing/", "Noch keine Abrechnungszeiträume"),
        ("/operator/margin/", "Keine Nutzung in diesem Monat"),
        ("/operator/users/", "Ohne 2FA"),
        ("/operator/fleet/", "Keine Worker in diesem Zeitraum"),
        ("/operator/audit/", "Audit-Log"),
    ],
)
def test_pages_of_operators_and_of_settings_are_translated(client, acme, path, expected):
    if path.startswith("/operator/"):
        client.force_login(User.objects.create_superuser("operator@example.com"))
    german = page(client, path, **GERMAN)
    assert '<html lang="de"' in german
    assert expected in german
