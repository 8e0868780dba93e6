"""Price books: active prices, versions, three ways to draft a version, and its publication."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, cast

from django.forms import Form
from django.http import Http404, HttpResponse
from django.shortcuts import render
from django.urls import path
from django.utils.http import urlencode
from django.utils.translation import gettext as _

from billing.models import PriceBook, PriceVersion
from billing.pricing.prices import (
    do_cancel_prices,
    do_discard_prices,
    do_propose_prices,
    do_publish_as_sole_operator,
    do_publish_prices,
    do_revise_prices,
)
from billing.rates.price_book import MAX_NAME_LENGTH, Proposal, parse
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
from frontend.operator.prices.studio import StudioForm, find_studio, page_data, project
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
            "projection",
            _lazy("A month at these prices"),
            "operator/prices/studio.html#projection",
            detail.projection,
            every=0,
            lazy=True,
        ),
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
    form = _model_form(ctx, _plain(ctx))
    return _draft(ctx, form, _("Prices of a model"), "operator/prices/page.html#model")


@operator_page(methods=FORM)
def studio(ctx: PageContext) -> HttpResponse:
    """Draft the prices of one model in all tiers, beside what it costs and what the last month would have cost."""
    with ctx.scope():
        found = find_studio(ctx, _model_of(ctx))
        shown = page_data(ctx, found)
    query = urlencode(found.owner.query | {"model": found.model})
    return form_view(
        ctx,
        _("Price studio"),
        StudioForm(found, bound_data(ctx)),
        lambda data: do_propose_prices(
            data["proposal"],
            book=found.owner.book,
            tenant=found.owner.tenant,
            effective_from=data["since"],
            note=data["note"],
            created_by=ctx.user,
        ),
        submit=_("Create draft"),
        back=ctx.url("operator-prices"),
        message=lambda _done: page.describe_draft(ctx, is_new=True),
        then=lambda made: ctx.url("operator-prices-detail", made.pk),
        template="operator/prices/studio.html",
        breadcrumbs=(_book(ctx),),
        action_url=ctx.request.get_full_path(),
        effect_url=f"{ctx.url('operator-prices-studio-effect')}?{query}",
        month_url=f"{ctx.url('operator-prices-studio-month')}?{query}",
        **shown,
    )


@operator_page(methods=("POST",))
def studio_effect(ctx: PageContext) -> HttpResponse:
    """Return the changes and margins at the prices as typed so far."""
    return _render_effect(ctx, with_month=False)


@operator_page(methods=("POST",), cost=REPORT_COST)
def studio_month(ctx: PageContext) -> HttpResponse:
    """Return the last complete month at the prices as typed so far, with their changes and margins."""
    return _render_effect(ctx, with_month=True)


def _render_effect(ctx: PageContext, *, with_month: bool) -> HttpResponse:
    with ctx.scope():
        found = find_studio(ctx, _model_of(ctx))
        form, panel = StudioForm(found, ctx.request.POST, is_draft=False), None
        if form.is_valid() and form.changes and with_month:
            book = PriceBook.objects.filter(name=found.owner.book).first() or PriceBook(name=found.owner.book)
            tenant_id = None if found.owner.tenant is None else found.owner.tenant.pk
            panel = project(ctx, form.cleaned_data["proposal"], book, tenant_id)
        context = {"form": form, "panel": panel, "ctx": ctx}
        return render(ctx.request, "operator/prices/studio.html#effect", context)


def _model_of(ctx: PageContext) -> str:
    return ctx.query.get("model", "").strip()[:MAX_NAME_LENGTH]


@operator_page(methods=FORM, cost=REPORT_COST)
def edit(ctx: PageContext) -> HttpResponse:
    """Edit a draft: in the form of a model, or as CSV if the form lacks a part of its prices."""
    with ctx.scope():
        row = detail.version_of(ctx)
        if row.state != PriceVersion.State.DRAFT or not row.body:
            raise Http404
        proposal, initial = parse(row.body), _owner_and_note(row)
    if len(proposal.model_tiers) == 1 and not proposal.withdrawn and all(map(page.is_plain, proposal.prices)):
        ((name, tier),) = proposal.model_tiers
        initial |= {"model": name, "tier": tier.value} | page.usd_fields(proposal.prices)
        form: forms.PriceDraftForm = _model_form(ctx, page.copy_prices(ctx) or initial)
        template = "operator/prices/page.html#model"
    else:
        form = forms.CsvImportForm(bound_data(ctx), ctx.request.FILES or None, initial=initial | _as_csv(proposal))
        template = "operator/prices/page.html#csv"
    return _draft(ctx, form, _("Edit draft %(number)s") % {"number": row.pk}, template, row)


@operator_page(methods=FORM, cost=REPORT_COST)
def upload(ctx: PageContext) -> HttpResponse:
    """Draft prices as CSV, starting from a model or a version in the query string."""
    form = forms.CsvImportForm(bound_data(ctx), ctx.request.FILES or None, initial=_rows(ctx))
    return _draft(ctx, form, _("Prices as CSV"), "operator/prices/page.html#csv")


def _draft(
    ctx: PageContext, form: forms.PriceDraftForm, title: str, template: str, row: PriceVersion | None = None
) -> HttpResponse:
    """Create a draft, or change `row`."""
    return form_view(
        ctx,
        title,
        form,
        lambda data: _propose(ctx, data, row),
        submit=_("Create draft") if row is None else _("Save"),
        back=ctx.url("operator-prices") if row is None else ctx.url("operator-prices-detail", row.pk),
        message=lambda _done: page.describe_draft(ctx, is_new=row is None),
        then=lambda made: ctx.url("operator-prices-detail", made.pk),
        template=template,
        breadcrumbs=(_book(ctx),),
    )


def _propose(ctx: PageContext, data: dict[str, Any], row: PriceVersion | None) -> PriceVersion:
    given = {"book": data["book"], "tenant": data["tenant"], "effective_from": data["since"], "note": data["note"]}
    if row is None:
        return do_propose_prices(data["proposal"], created_by=ctx.user, **given)
    return do_revise_prices(row, data["proposal"], by=ctx.user, **given)


def _model_form(ctx: PageContext, initial: dict[str, Any]) -> forms.ModelPricesForm:
    with ctx.scope():
        models = page.priced_models(ctx)
    return forms.ModelPricesForm(bound_data(ctx), initial, models, ctx.request.path)


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
    return form_view(
        ctx,
        _("Publish %(version)s") % {"version": in_sentence(header["heading"])},
        Confirm(str(row.pk), bound_data(ctx)),
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
        % (_scope_of(header, row) | {"since": since}),
        danger=True,
    )


def _scope_of(header: dict[str, Any], row: PriceVersion) -> dict[str, Any]:
    """Return the values of a sentence about the prices of a version."""
    owner = header["owner"] if row.tenant_id is not None else _("all tenants on “%(name)s”") % {"name": row.book.name}
    return {"prices": header["prices"], "models": header["models"], "owner": owner}


@operator_page(methods=FORM, step_up=True)
def publish_as_sole_operator(ctx: PageContext) -> HttpResponse:
    """Schedule the user's own draft, with the password and, where there is one, a recent second factor."""
    with ctx.scope():
        header, row = detail.header(ctx), detail.version_of(ctx)
    return form_view(
        ctx,
        _("Publish %(version)s without a second operator") % {"version": in_sentence(header["heading"])},
        forms.SoleOperatorForm(ctx, bound_data(ctx)),
        lambda _: do_publish_as_sole_operator(row, by=ctx.user),
        submit=_("Publish"),
        back=ctx.url("operator-prices-detail", row.pk),
        message=lambda made: (
            _("The prices take effect on %(time)s UTC. Until then, they can be cancelled.")
            % {"time": day_text(cast(datetime, made.effective_from), "j F Y, H:i")}
        ),
        breadcrumbs=(_book(ctx),),
        effect=_(
            "%(prices)s prices of %(models)s models apply to %(owner)s, in an hour at the earliest. Until then, any "
            "operator can cancel them. You can do this because you are the only active operator."
        )
        % _scope_of(header, row),
    )


@operator_page(methods=FORM, step_up=True)
def cancel(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        header, row = detail.header(ctx), detail.version_of(ctx)
    return _end_version(
        ctx,
        row,
        do_cancel_prices,
        title=_("Cancel %(version)s") % {"version": in_sentence(header["heading"])},
        submit=_("Cancel prices"),
        message=_("Version %(number)s of %(book)s was cancelled.") % {"number": row.number, "book": row.book},
        effect=_("These prices never take effect. They can be copied to a new draft."),
    )


@operator_page(methods=FORM, step_up=True)
def discard(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        row = detail.version_of(ctx)
    return _end_version(
        ctx,
        row,
        do_discard_prices,
        title=_("Discard draft %(number)s") % {"number": row.pk},
        submit=_("Discard"),
        message=_("Draft %(number)s was discarded.") % {"number": row.pk},
        effect=_("The draft stays readable and can be copied to a new draft. It can no longer be published."),
    )


def _end_version(
    ctx: PageContext,
    row: PriceVersion,
    action: Callable[..., PriceVersion],
    *,
    title: str,
    submit: str,
    message: str,
    effect: str,
) -> HttpResponse:
    """End a version that has not taken effect, after a confirmation."""
    return form_view(
        ctx,
        title,
        Form(bound_data(ctx)),
        lambda _: action(row, by=ctx.user),
        submit=submit,
        back=ctx.url("operator-prices-detail", row.pk),
        message=lambda _done: message,
        breadcrumbs=(_book(ctx),),
        effect=effect,
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
    if copied := page.copy_prices(ctx):
        return copied
    name, tier = ctx.query.get("model", "")[:MAX_NAME_LENGTH], ctx.query.get("tier", Tier.STANDARD.value)
    with ctx.scope():
        initial = _price_owner(ctx) | {"model": name, "tier": tier}
        return initial | page.usd_fields(page.plain_prices(ctx, name, tier))


def _owner_and_note(row: PriceVersion) -> dict[str, Any]:
    """Return the initial values of a draft's form without its prices. Call inside `ctx.scope()`."""
    slug = Tenant.objects.all_tenants().filter(pk=row.tenant_id or 0).values_list("slug", flat=True).first()
    since = "" if row.effective_from is None else f"{row.effective_from.astimezone(UTC):%Y-%m-%d %H:%M}"
    return {"book": row.book.name, "tenant": slug or "", "since": since, "note": row.note}


def _as_csv(proposal: Proposal) -> dict[str, str]:
    """Return the initial values of the CSV form for these prices."""
    withdrawn = "\n".join(f"{model},{tier.value}" for model, tier in proposal.withdrawn)
    return {"text": page.as_text(proposal.prices), "withdrawn": withdrawn}


def _rows(ctx: PageContext) -> dict[str, Any]:
    """Return the initial CSV: the prices of a version or of a model."""
    name, copied = ctx.query.get("model", "")[:MAX_NAME_LENGTH], ctx.query.get("copy", "")
    with ctx.scope():
        if copied.isascii() and copied.isdigit() and len(copied) < 18:
            row = PriceVersion.objects.select_related("book").filter(pk=int(copied)).first()
            if row is not None and row.body:
                return _owner_and_note(row) | {"since": ""} | _as_csv(parse(row.body))
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
    path("operator/prices/studio", studio, name="operator-prices-studio"),
    path("operator/prices/studio/effect", studio_effect, name="operator-prices-studio-effect"),
    path("operator/prices/studio/month", studio_month, name="operator-prices-studio-month"),
    path("operator/prices/csv", upload, name="operator-prices-csv"),
    path("operator/prices/import", public, name="operator-prices-import"),
    BOOK.operator_url("operator/prices/"),
    path("operator/prices/<int:version>/", version, name="operator-prices-detail"),
    path("operator/prices/<int:version>/edit", edit, name="operator-prices-edit"),
    path("operator/prices/<int:version>/publish", publish, name="operator-prices-publish"),
    path("operator/prices/<int:version>/discard", discard, name="operator-prices-discard"),
    path(
        "operator/prices/<int:version>/publish-as-sole-operator",
        publish_as_sole_operator,
        name="operator-prices-publish-as-sole-operator",
    ),
    path("operator/prices/<int:version>/cancel", cancel, name="operator-prices-cancel"),
    DETAIL_PANELS.operator_url("operator/prices/<int:version>/"),
]
