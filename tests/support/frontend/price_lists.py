"""Price versions and sessions for tests of the operator's price pages."""

from __future__ import annotations

from django.test import Client
from playwright.sync_api import BrowserContext, Page

from billing.models import PriceVersion
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import User
from tests.support.frontend.console import remembered


def newest() -> PriceVersion:
    with all_tenants_scope(BypassReason.PRICES):
        found = PriceVersion.objects.select_related("book", "created_by").first()
    assert found is not None
    return found


def log_in(user: User) -> Client:
    client = Client()
    client.force_login(user)
    remembered(client.session)
    return client


def page_of(context: BrowserContext, served: str, user: User) -> Page:
    session = log_in(user).session.session_key
    context.add_cookies([{"name": "sessionid", "value": session or "", "url": served}])
    return context.new_page()
