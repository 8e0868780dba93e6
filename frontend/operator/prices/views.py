"""Price books: active prices, versions, three ways to draft a version, and its publication."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from django.urls import path
from django.utils.translation import gettext as _

from billing.models import PriceVersion
from billing.pricing.prices import do_discard_prices, do_propose_prices, do_publish_prices
from billing.rates.price_book import parse
from billing.rates.pricing import Tier
from frontend.core.confirmation import Confirm
from frontend.core.form_view import bound_data, form_view
from frontend.core.languages import day_text, in_sentence
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.page_context import FORM, PageContext, operator_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_form_errors, render_page
from frontend.core.screens import ConsoleScreen
from frontend.operator.prices import detail, forms, page
from tenants.models import Tenant
from tenants.request_costs import REPORT_COST

MAX_LISTED = 100  # skipped prices shown per reason
BOOK = Panels(
    "operator-prices-panel",
    (
        Panel("versions", _lazy("Versions"), "operator/prices/page.html#versions", page.versions),
        Panel("active", _lazy("Active prices"), "operator/prices/page.html#active", page.active_prices, every=0),
    ),
)
DETAIL_PANELS = Panels(
    "operator-prices-detail-panel",
    (
        Panel("diff", _lazy("Changes"), "operator/prices/detail.html#diff", detail.diff, every=0),
        Panel(
            "preview",
            _lazy("Last month at these prices"),
            "operator/prices/detail.html#preview",
            detail.preview,
            every=0,
            lazy=True,
        ),
    ),
)


@operator_page()
def prices(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        filters = page.filters(ctx)
    return render_page(ctx, "operator/prices/page.html", _("Price book"), panels=BOOK, filters=filters)


@operator_page()
def version(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        header = detail.header(ctx)
    title = f"{header['heading']}, {header['owner']}"
    context = {"breadcrumbs": (_book(ctx),), **header}
    return render_page(ctx, "operator/prices/detail.html", title, panels=DETAIL_PANELS, **context)


@operator_page(methods=FORM)
def model(ctx: PageContext) -> HttpResponse:
    """Draft the prices of one model, starting from the active ones."""
    form = forms.ModelPricesForm(bound_data(ctx), _plain(ctx))
    return _draft(ctx, form, _("Prices of a model"), "operator/prices/page.html#model")


@operator_page(methods=FORM, cost=REPORT_COST)
def upload(ctx: PageContext) -> HttpResponse:
    """Draft prices as CSV, starting from a model or a version in the query string."""
    form = forms.CsvImportForm(bound_data(ctx), ctx.request.FILES or None, initial=_rows(ctx))
    return _draft(ctx, form, _("Prices as CSV"), "operator/prices/page.html#csv")


def _draft(ctx: PageContext, form: forms.PriceDraftForm, title: str, template: str) -> HttpResponse:
    return form_view(
        ctx,
        title,
        form,
        lambda data: _propose(ctx, data),
        submit=_("Create draft"),
        back=ctx.url("operator-prices"),
        message=lambda _done: _("Draft created. Another operator must publish it."),
        then=lambda made: ctx.url("operator-prices-detail", made.pk),
        template=template,
        breadcrumbs=(_book(ctx),),
    )


def _propose(ctx: PageContext, data: dict[str, Any]) -> PriceVersion:
    return do_propose_prices(
        data["proposal"],
        book=data["book"],
        tenant=data["tenant"],
        effective_from=data["since"],
        note=data["note"],
        created_by=ctx.user,
    )


@operator_page(methods=FORM)
def public(ctx: PageContext) -> HttpResponse:
    """Read the public price file and show the prices that cannot be imported. The others continue as CSV."""
    form = forms.PublicPricesForm(bound_data(ctx), ctx.request.FILES or None)
    context, title = _make_context(ctx), _("Import public price file")
    if ctx.request.method == "POST":
        if not form.is_valid():
            return render_form_errors(ctx, "operator/prices/page.html#import", title, form, **context)
        read = form.cleaned_data["imported"]
        left = tuple(
            (label, rows[:limit], len(rows), max(0, len(rows) - limit))
            for label, rows, limit in (
                (
                    _("Rounded to whole nano-USD") if read.rounded else _("Skipped: not whole nano-USD"),
                    read.not_whole,
                    MAX_LISTED,
                ),
                (_("Invalid: negative or not a number"), read.refused, MAX_LISTED),
                (_("Models without a price per token"), read.unpriced, MAX_LISTED),
                (_("Models listed as free"), read.free, MAX_LISTED),
                (
                    _("Assumed prices, which the file does not have"),
                    read.assumed,
                    len(read.assumed),  # each of them may be wrong
                ),
                (
                    _("Prices of unmetered usage"),
                    [f"{k}: {n}" for k, n in read.other_fields.most_common()],
                    MAX_LISTED,
                ),
            )
            if rows
        )
        draft = forms.CsvImportForm(initial={"text": page.as_text(read.prices), "note": _("Public price file")})
        models = len({price.model for price in read.prices})
        shown = context | {"action": ctx.url("operator-prices-csv"), "left": left, "models": models}
        return render_page(
            ctx, "operator/prices/page.html#import_confirmation", title, form=draft, prices=len(read.prices), **shown
        )
    return render_page(ctx, "operator/prices/page.html#import", title, form=form, **context)


@operator_page(methods=FORM, step_up=True)
def publish(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        header, row = detail.header(ctx), detail.version_of(ctx)
    since = (
        _("From %(effective_from)s UTC") % {"effective_from": day_text(row.effective_from, "j F Y, H:i")}
        if row.effective_from
        else _("From now")
    )
    owner = header["owner"] if row.tenant_id is not None else _("all tenants on “%(name)s”") % {"name": row.book.name}
    return form_view(
        ctx,
        _("Publish %(version)s") % {"version": in_sentence(header["heading"])},
        Confirm(_("publish %(number)s") % {"number": row.pk}, bound_data(ctx)),
        lambda _: do_publish_prices(row, by=ctx.user),
        submit=_("Publish"),
        back=ctx.url("operator-prices-detail", row.pk),
        message=lambda made: (
            _("Version %(number)s of %(book)s was published.") % {"number": made.number, "book": made.book}
        ),
        breadcrumbs=(_book(ctx),),
        effect=_(
            "%(since)s, %(prices)s prices of %(models)s models apply to %(owner)s. Published prices never "
            "change. A later version replaces them."
        )
        % {"since": since, "prices": header["prices"], "models": header["models"], "owner": owner},
        danger=True,
    )


@operator_page(methods=FORM, step_up=True)
def discard(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        row = detail.version_of(ctx)
    return form_view(
        ctx,
        _("Discard draft %(number)s") % {"number": row.pk},
        Confirm(_("discard %(number)s") % {"number": row.pk}, bound_data(ctx)),
        lambda _: do_discard_prices(row, by=ctx.user),
        submit=_("Discard"),
        back=ctx.url("operator-prices-detail", row.pk),
        message=lambda _done: _("Draft %(number)s was discarded.") % {"number": row.pk},
        breadcrumbs=(_book(ctx),),
        effect=_("The draft stays readable and can be copied to a new draft. It can no longer be published."),
        danger=True,
    )


def _make_context(ctx: PageContext) -> dict[str, Any]:
    return {"action": ctx.request.path, "back": ctx.url("operator-prices"), "breadcrumbs": (_book(ctx),)}


def _book(ctx: PageContext) -> Breadcrumb:
    return Breadcrumb(_("Price book"), ctx.url("operator-prices"))


def _price_owner(ctx: PageContext) -> dict[str, Any]:
    now = page.query_of(ctx)
    return {"book": now.book, "tenant": now.tenant.slug if now.tenant else ""}


def _plain(ctx: PageContext) -> dict[str, Any]:
    """Return the initial values of a model's form."""
    name, tier = ctx.query.get("model", "")[:128], ctx.query.get("tier", Tier.STANDARD.value)
    with ctx.scope():
        initial = _price_owner(ctx) | {"model": name, "tier": tier}
        rows = page.prices_at(page.query_of(ctx), ctx.now).filter(model=name, tier=tier)
        found = page.as_new(rows) if name else []
    return initial | {price.component.value: page.usd(price.nano_per_million) for price in found}


def _rows(ctx: PageContext) -> dict[str, Any]:
    """Return the initial CSV: the prices of a version or of a model."""
    name, copied = ctx.query.get("model", "")[:128], ctx.query.get("copy", "")
    with ctx.scope():
        if copied.isascii() and copied.isdigit() and len(copied) < 18:
            row = PriceVersion.objects.select_related("book").filter(pk=int(copied)).first()
            if row is not None and row.body:
                owners = Tenant.objects.all_tenants().filter(pk=row.tenant_id or 0)
                slug = owners.values_list("slug", flat=True).first()
                proposal = parse(row.body)
                ended = "\n".join(f"{model},{tier.value}" for model, tier in proposal.withdrawn)
                initial = {"book": row.book.name, "tenant": slug or "", "note": row.note, "withdrawn": ended}
                return initial | {"text": page.as_text(proposal.prices)}
        rows = page.prices_at(page.query_of(ctx), ctx.now).filter(model=name)
        found = page.as_new(rows) if name else []
        return _price_owner(ctx) | {"text": page.as_text(found)}


SCREEN = ConsoleScreen(
    "operator-prices",
    _lazy("Price book"),
    icon="prices",
    letter="p",
    group="billing",
    order=20,
    finders={_lazy("Prices"): page.find_prices},
)
urlpatterns = [
    path("operator/prices/", prices, name="operator-prices"),
    path("operator/prices/model", model, name="operator-prices-model"),
    path("operator/prices/csv", upload, name="operator-prices-csv"),
    path("operator/prices/import", public, name="operator-prices-import"),
    BOOK.operator_url("operator/prices/"),
    path("operator/prices/<int:version>/", version, name="operator-prices-detail"),
    path("operator/prices/<int:version>/publish", publish, name="operator-prices-publish"),
    path("operator/prices/<int:version>/discard", discard, name="operator-prices-discard"),
    DETAIL_PANELS.operator_url("operator/prices/<int:version>/"),
]
