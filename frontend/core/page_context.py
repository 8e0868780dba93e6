"""Who looks at what: the decorators that every view of the console stands behind, and what they hand to it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, tzinfo
from functools import wraps
from typing import Any, TypeVar
from urllib.parse import urlsplit

from allauth.account.internal.flows.reauthentication import suspend_request
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.urls import NoReverseMatch, reverse
from django.utils import timezone
from django.utils.http import urlencode
from django.views.decorators.cache import never_cache

from frontend.core.impersonation import READING, viewing
from frontend.core.timezones import zone_of
from tenants.audit import current_actor
from tenants.authentication import Access, accesses
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import Tenant, User
from tenants.permissions import STEP_UP, Permission
from tenants.reauthentication import has_totp, recently_authenticated

T = TypeVar("T")
READ = ("GET", "HEAD")
FORM = (*READ, "POST")


@dataclass(frozen=True)
class PageContext:
    """One request to the console by a person. `access` is None on operators' own pages."""

    request: HttpRequest
    user: User
    access: Access | None
    now: datetime
    zone: tzinfo
    arguments: Mapping[str, Any]  # of the address, but for the tenant's slug
    others: tuple[Tenant, ...] = ()  # the other tenants this person is a member of
    known: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)  # what `once` has found

    @property
    def tenant(self) -> Tenant:
        if self.access is None:
            raise TypeError("an operator's page is about no tenant")
        return self.access.tenant

    @property
    def query(self) -> Mapping[str, str]:
        """The filters in the address."""
        return self.request.GET.dict()

    @property
    def is_fragment(self) -> bool:
        """Whether a part of the page asks, so that no frame is wanted around the answer."""
        return self.request.headers.get("HX-Request") == "true"

    @property
    def request_id(self) -> str:
        return current_actor().request_id

    def may(self, permission: Permission | None) -> bool:
        """Whether the person's role lets them. Operators may everything."""
        return permission is None or self.access is None or permission in self.access.permissions

    def scope(self) -> AbstractContextManager[None]:
        """Open a transaction that sees the tenant's rows; on operator pages, the rows of all tenants."""
        return all_tenants_scope(BypassReason.OPERATOR) if self.access is None else tenant_scope(self.access.tenant)

    def once(self, key: Hashable, find: Callable[[], T]) -> T:
        """Return the result of `find`, which is called once for all panels of this page."""
        if key not in self.known:
            self.known[key] = find()
        found: T = self.known[key]
        return found

    def url(self, name: str, *arguments: Any) -> str:
        """Return the address of another of this tenant's, or the operator's, pages."""
        return reverse(name, args=arguments if self.access is None else (self.access.tenant.slug, *arguments))

    def link(self, name: str, *arguments: Any) -> str:
        """As `url`; empty while there is no such page."""
        try:
            return self.url(name, *arguments)
        except NoReverseMatch:
            return ""


View = Callable[[PageContext], HttpResponse]


def tenant_page(
    needs: Permission = Permission.TENANT_READ, *, methods: tuple[str, ...] = READ, step_up: bool | None = None
) -> Callable[[View], Callable[..., HttpResponse]]:
    """Decorate a view below /t/<slug>/. Another's tenant is not found; a role that lacks `needs` is refused.

    An operator is asked to begin to view the tenant first, and then only reads (`frontend.core.impersonation`).

    A form that is sent asks for a recent proof of who it is if `needs` is one of STEP_UP; `step_up` says otherwise.
    """
    asked = needs in STEP_UP if step_up is None else step_up

    def decorate(view: View) -> Callable[..., HttpResponse]:
        @wraps(view)
        def wrapped(request: HttpRequest, slug: str, **arguments: Any) -> HttpResponse:
            def enter(user: User) -> PageContext:
                mine = accesses(user, slug) if user.is_staff else accesses(user)
                found = [access for access in mine if access.tenant.slug == slug]
                if not found:
                    raise Http404
                access = _reading(request, found[0]) if user.is_staff else found[0]
                others = tuple(access.tenant for access in mine if access.tenant.slug != slug)
                return PageContext(request, user, access, datetime.now(UTC), zone_of(request), arguments, others)

            return _run(request, view, enter, needs, methods, asked)

        return never_cache(wrapped)

    return decorate


def operator_page(
    *, methods: tuple[str, ...] = READ, step_up: bool = False
) -> Callable[[View], Callable[..., HttpResponse]]:
    """Decorate a view below /operator/, which only operators can see. `step_up`: as for `tenant_page`."""

    def decorate(view: View) -> Callable[..., HttpResponse]:
        @wraps(view)
        def wrapped(request: HttpRequest, **arguments: Any) -> HttpResponse:
            def enter(user: User) -> PageContext:
                if not user.is_staff:
                    raise Http404
                return PageContext(request, user, None, datetime.now(UTC), zone_of(request), arguments)

            return _run(request, view, enter, None, methods, step_up)

        return never_cache(wrapped)

    return decorate


class _ViewFirst(Exception):
    """An operator wants to see a tenant's page without viewing that tenant."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.url = url


def _reading(request: HttpRequest, access: Access) -> Access:
    """Return an operator's access: to the tenant they view, to read."""
    if request.method not in READ:
        raise PermissionDenied
    found = viewing(request)
    if found is None or found.tenant_id != access.tenant.pk:
        asked = reverse("operator-tenants-view", args=[access.tenant.pk])
        raise _ViewFirst(f"{asked}?{urlencode({'next': page_of(request)})}")
    return replace(access, permissions=READING)


def _run(
    request: HttpRequest,
    view: View,
    enter: Callable[[User], PageContext],
    needs: Permission | None,
    methods: tuple[str, ...],
    step_up: bool,
) -> HttpResponse:
    user = request.user
    if not isinstance(user, User):
        return leave_for(request, redirect_to_login(page_of(request)))
    try:
        visit = enter(user)
    except _ViewFirst as exc:
        return leave_for(request, HttpResponseRedirect(exc.url))
    if not visit.may(needs):
        raise PermissionDenied
    if request.method not in methods:
        return HttpResponseNotAllowed(methods)
    if step_up and request.method == "POST" and not recently_authenticated(request):
        return prove(request, user)
    with timezone.override(visit.zone):
        return view(visit)


def prove(request: HttpRequest, user: User) -> HttpResponse:
    """Ask for the TOTP code, or the password until that is enrolled. A form that was sent is then carried out.

    It is, if `next` is its bare path: what stood behind that is kept with the form.
    """
    page = reverse("mfa_reauthenticate" if has_totp(user) else "account_reauthenticate")
    whole = copy(request)  # its answer comes after a page of its own, also if only a part of one asked
    whole.META = {name: value for name, value in request.META.items() if name != "HTTP_HX_REQUEST"}
    suspend_request(whole, page)
    return leave_for(request, HttpResponseRedirect(f"{page}?{urlencode({'next': request.path})}"))


def leave_for(request: HttpRequest, answer: HttpResponseRedirect) -> HttpResponse:
    """Return a redirect that leaves the page also if only a part of it asked."""
    if request.headers.get("HX-Request") != "true":
        return answer
    return HttpResponse(status=200, headers={"HX-Redirect": answer.url})


def page_of(request: HttpRequest) -> str:
    """Where to come back to: the page itself, also if only a part of it asked."""
    shown = request.headers.get("HX-Current-URL", "")
    parts = urlsplit(shown)
    path = f"{parts.path}?{parts.query}" if parts.query else parts.path
    return path if path.startswith("/") and not path.startswith("//") else request.get_full_path()
