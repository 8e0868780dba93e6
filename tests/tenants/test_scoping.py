"""Tenants' rows cannot be asked for without saying whose."""

from __future__ import annotations

import pytest

from tenants.actions import do_create_project, do_create_tenant
from tenants.models import ApiKey, Membership, Project
from tenants.scoping import UnscopedQueryError

pytestmark = pytest.mark.django_db


def test_it_works():
    tenant = do_create_tenant("acme", "Acme")
    do_create_project(tenant, "second", "Second")
    assert [project.slug for project in Project.objects.for_tenant(tenant)] == ["default", "second"]
    assert Project.objects.for_tenant(tenant.pk).count() == 2


def test_it_rejects_other_tenants():
    acme, other = do_create_tenant("acme", "Acme"), do_create_tenant("other", "Other")
    theirs = Project.objects.for_tenant(other).get()
    assert not Project.objects.for_tenant(acme).filter(pk=theirs.pk).exists()
    assert Project.objects.all_tenants("the test counts them").count() == 2


@pytest.mark.parametrize("model", [Project, Membership, ApiKey])
@pytest.mark.parametrize("ask", ["all", "get", "first", "count", "exists"])
def test_unscoped_queries_raise(model, ask):
    with pytest.raises(UnscopedQueryError):
        getattr(model.objects, ask)()


def test_all_tenants_wants_a_reason():
    with pytest.raises(UnscopedQueryError):
        Project.objects.all_tenants("")


def test_a_row_belongs_to_a_tenant():
    with pytest.raises(UnscopedQueryError):
        Project.objects.create(slug="stray", name="Stray")
