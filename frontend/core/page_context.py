"""View decorators: authentication, tenant lookup, permission checks and re-authentication."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, tzinfo
from functools import partial, wraps
from http import HTTPStatus
from typing import Any, TypeVar

from django.conf import settings
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import PermissionDenied
from django.db.models import Model, QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.http.response import HttpResponseBase
from django.shortcuts import resolve_url
from django.urls import reverse
from django.utils import timezone
from django.utils.http import urlencode
from django.views.decorators.cache import never_cache

from billing.currencies.amounts import DEFAULT_CURRENCY
from billing.pricing.currencies import currency_of
from frontend.core.form_validation import validate_form
from frontend.core.impersonation import READ_PERMISSIONS, impersonation_of
from frontend.core.numbers import shown_currency
from frontend.core.suspended_forms import drop_form, resume_form, suspend_form
from frontend.core.timezones import zone_of
from tenants.audit import current_actor
from tenants.authentication import Access, accesses
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, is_visible, tenant_scope
from tenants.models import Tenant, User
from tenants.notifications.reading import count_unread, viewer_of
from tenants.permissions import STEP_UP, Permission
from tenants.reauthentication import reauthentication_route, recently_authenticated
from tenants.request_costs import SIMPLE_COST, with_cost
from tenants.site_urls import site_url_in_header

T = TypeVar("T")
M = TypeVar("M", bound=Model)
_CONTEXT = "millrace_page_context"  # the attribute of a request
_UNREAD = "unread_notifications"  # the key of `PageContext.known`
READ = ("GET", "HEAD")
FORM = (*READ, "POST")


@dataclass(frozen=True)
class PageContext:
    """One request of a user to the console. `access` is None on operator pages."""

    request: HttpRequest
    user: User
    access: Access | None
    now: datetime
    zone: tzinfo
    arguments: Mapping[str, Any]  # arguments of the URL without the tenant's slug
    others: tuple[Tenant, ...] = ()  # other tenants of the user
    known: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)  # results of `once`

    @property
    def tenant(self) -> Tenant:
        if self.access is None:
            raise TypeError("an operator's page is about no tenant")
        return self.access.tenant

    @property
    def query(self) -> Mapping[str, str]:
        """The parameters of the query string."""
        return self.request.GET.dict()

    @property
    def is_fragment(self) -> bool:
        """True for a request of a part of the page, which is answered without the layout."""
        return self.request.headers.get("HX-Request") == "true"

    @property
    def request_id(self) -> str:
        return current_actor().request_id

    def may(self, permission: Permission | None) -> bool:
        """Return whether the user has the permission. Operators have every permission."""
        return permission is None or self.access is None or permission in self.access.permissions

    def scope(self) -> AbstractContextManager[None]:
        """Open a transaction that sees the tenant's rows; on operator pages, the rows of all tenants.

        The first one of a complete operator page also counts the unread notifications of the layout.
        """
        return self._operator_scope() if self.access is None else tenant_scope(self.access.tenant)

    @contextmanager
    def _operator_scope(self) -> Iterator[None]:
        with all_tenants_scope(BypassReason.OPERATOR):
            if not self.is_fragment:
                self.once(_UNREAD, lambda: count_unread(viewer_of(self.user, None)))
            yield

    def count_unread(self) -> int:
        """Return the number of the user's unread notifications, of the tenant or of operators."""
        if self.access is not None:
            return self.access.unread
        if _UNREAD not in self.known and not self.is_fragment:
            with self.scope():
                pass
        return int(self.known.get(_UNREAD, 0))

    def once(self, key: Hashable, find: Callable[[], T]) -> T:
        """Return the result of `find`, which is called once for all panels of this page."""
        if key not in self.known:
            self.known[key] = find()
        found: T = self.known[key]
        return found

    def url(self, name: str, *arguments: Any) -> str:
        """Return the URL of a page of the same tenant, or of an operator page."""
        return reverse(name, args=arguments if self.access is None else (self.access.tenant.slug, *arguments))

    @property
    def can(self) -> _Permissions:
        """The user's permissions for templates: `ctx.can.KEYS_WRITE`."""
        return _Permissions(self)

    def get(self, rows: Callable[[], QuerySet[M]]) -> M:
        """Return the first of the rows, which are read in the page's scope.

        Raises:
            Http404: there is none.
        """
        with self.scope():
            return first_or_404(rows())


@dataclass(frozen=True)
class _Permissions:
    ctx: PageContext

    def __getitem__(self, name: str) -> bool:
        return self.ctx.may(Permission[name])


def context_of(request: HttpRequest) -> PageContext | None:
    """Return the context of the page that the request is for; None if the user may not know of the page."""
    found = getattr(request, _CONTEXT, None)
    return found if isinstance(found, PageContext) else None


def first_or_404(rows: QuerySet[M]) -> M:
    """Return the first of the rows.

    Raises:
        Http404: there is none.
    """
    found = rows.first()
    if found is None:
        raise Http404
    return found


View = Callable[[PageContext], HttpResponseBase]


def tenant_page(
    needs: Permission = Permission.TENANT_READ,
    *,
    methods: tuple[str, ...] = READ,
    step_up: bool | None = None,
    cost: int = SIMPLE_COST,
) -> Callable[[View], Callable[..., HttpResponseBase]]:
    """Decorate a view below /t/<slug>/. Another tenant is a 404; a missing permission is a 403.

    An operator must start an impersonation first and can then only read (`frontend.core.impersonation`).

    A submitted form requires re-authentication if `needs` is one of STEP_UP, or as `step_up` says. The form is
    validated first (`frontend.core.form_validation`). `cost` is that of a request (`tenants.request_costs`).
    """
    required = needs in STEP_UP if step_up is None else step_up

    def decorate(view: View) -> Callable[..., HttpResponseBase]:
        @wraps(view)
        def handle(request: HttpRequest, slug: str, **arguments: Any) -> HttpResponseBase:
            def enter(user: User) -> PageContext:
                counted = "" if is_part_of_page(request) else slug
                accessible = accesses(user, slug) if user.is_staff else accesses(user, counted_slug=counted)
                found = [access for access in accessible if access.tenant.slug == slug]
                if not found:
                    raise Http404
                access = _impersonated_access(request, found[0]) if user.is_staff else found[0]
                others = tuple(access.tenant for access in accessible if access.tenant.slug != slug)
                return PageContext(request, user, access, datetime.now(UTC), zone_of(request), arguments, others)

            return _run(request, view, enter, needs, methods, required)

        return with_cost(cost, never_cache(handle))

    return decorate


def operator_page(
    *, methods: tuple[str, ...] = READ, step_up: bool = False, cost: int = SIMPLE_COST
) -> Callable[[View], Callable[..., HttpResponseBase]]:
    """Decorate a view below /operator/, which only operators can see. See `tenant_page` for `step_up` and `cost`."""

    def decorate(view: View) -> Callable[..., HttpResponseBase]:
        @wraps(view)
        def handle(request: HttpRequest, **arguments: Any) -> HttpResponseBase:
            def enter(user: User) -> PageContext:
                if not user.is_staff:
                    raise Http404
                return PageContext(request, user, None, datetime.now(UTC), zone_of(request), arguments)

            return _run(request, view, enter, None, methods, step_up)

        return with_cost(cost, never_cache(handle))

    return decorate


class MissingPermission(PermissionDenied):
    """The user's role lacks the permission that the page needs."""

    def __init__(self, needs: Permission | None) -> None:
        super().__init__(needs)
        self.needs = needs


class _ImpersonationRequired(Exception):
    """An operator opened a tenant's page without impersonating that tenant."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.url = url


def _impersonated_access(request: HttpRequest, access: Access) -> Access:
    """Return an operator's read-only access to the impersonated tenant."""
    if request.method not in READ:
        raise PermissionDenied
    found = impersonation_of(request)
    if found is None or found.tenant_id != access.tenant.pk:
        required = reverse("operator-tenants-view", args=[access.tenant.pk])
        raise _ImpersonationRequired(f"{required}?{urlencode({'next': page_of(request)})}")
    return replace(access, permissions=READ_PERMISSIONS)


def _run(
    request: HttpRequest,
    view: View,
    enter: Callable[[User], PageContext],
    needs: Permission | None,
    methods: tuple[str, ...],
    step_up: bool,
) -> HttpResponseBase:
    user = request.user
    if not isinstance(user, User):
        if is_part_of_page(request):
            return ask_to_sign_in(settings.LOGIN_URL)
        return redirect_to_login(page_of(request))
    try:
        ctx = enter(user)
    except _ImpersonationRequired as exc:
        return leave_for(request, HttpResponseRedirect(exc.url))
    setattr(request, _CONTEXT, ctx)
    if not ctx.may(needs):
        raise MissingPermission(needs)
    if step_up and not (user.is_staff and ctx.access):  # an impersonation is read-only
        resume_form(request)
    if request.method not in methods:
        return HttpResponseNotAllowed(methods)
    with timezone.override(ctx.zone), shown_currency(partial(_currency, ctx)):
        if step_up and request.method == "POST" and not recently_authenticated(request):
            return validate_form(partial(view, ctx)) or require_reauthentication(request, user)
        return view(ctx)


def _currency(ctx: PageContext) -> str:
    """Return the currency of the amounts on the page: that of the tenant that the page is about.

    Operator pages about several tenants name other currencies than USD themselves.
    """
    tenant_id = ctx.arguments.get("tenant") if ctx.access is None else ctx.access.tenant.pk
    if not isinstance(tenant_id, int):
        return DEFAULT_CURRENCY
    # In an open scope without another one, which costs a savepoint.
    with nullcontext() if is_visible(tenant_id) else all_tenants_scope(BypassReason.BILLING):
        return currency_of(tenant_id)


def require_reauthentication(request: HttpRequest, user: User) -> HttpResponse:
    """Ask for the code or passkey, or for the password of a user without them, and then process the submitted form.

    A form of a dialog stays on the page, which submits it again.
    """
    page = reverse(reauthentication_route(user))
    if is_part_of_page(request):
        drop_form(request)
        return ask_to_sign_in(page)
    return suspend_form(request, page)


def is_part_of_page(request: HttpRequest) -> bool:
    """Return whether a script requests a part of the page."""
    return request.headers.get("HX-Request") == "true"


def ask_to_sign_in(page: str) -> HttpResponse:
    """Return a 401 with the page that the script shows in a dialog. Afterwards, it sends the request again."""
    url = f"{resolve_url(page)}?{urlencode({'next': reverse('account_signed_in')})}"
    return HttpResponse(status=HTTPStatus.UNAUTHORIZED, headers={"X-Sign-In": url})


def leave_for(request: HttpRequest, answer: HttpResponseRedirect) -> HttpResponse:
    """Return a redirect of the complete page, also if a part of the page made the request."""
    if not is_part_of_page(request):
        return answer
    return HttpResponse(status=200, headers={"HX-Redirect": answer.url})


def page_of(request: HttpRequest) -> str:
    """Return the URL of the complete page, also if a part of the page made the request."""
    return site_url_in_header(request, "HX-Current-URL", any_host=True) or request.get_full_path()
