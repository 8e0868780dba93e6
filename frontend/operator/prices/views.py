"""The price book: active prices and versions, a version, three ways to draft one, and its publication."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from django.urls import path

from billing.actions.prices import do_discard_prices, do_propose_prices, do_publish_prices
from billing.models import PriceVersion
from billing.pricing.price_book import parse
from billing.pricing.pricing import Tier
from frontend.core.confirmation import Confirm
from frontend.core.form_view import ask, posted
from frontend.core.layout import Breadcrumb
from frontend.core.page_context import FORM, PageContext, operator_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import carry_out, done, refused, show
from frontend.operator.prices import detail, forms, page
from tenants.models import Tenant

LISTED = 100  # of each kind that an import leaves out
BOOK = Panels(
    "operator-prices-panel",
    (
        Panel("versions", "Versions", "operator/prices/versions.html", page.versions),
        Panel("active", "Active prices", "operator/prices/active.html", page.in_force, every=0),
    ),
)
ONE = Panels(
    "operator-prices-detail-panel",
    (
        Panel("diff", "Changes", "operator/prices/diff.html", detail.diff, every=0),
        Panel(
            "preview", "Last month at these prices", "operator/prices/preview.html", detail.rerated, every=0, lazy=True
        ),
    ),
)


@operator_page()
def prices(visit: PageContext) -> HttpResponse:
    with visit.scope():
        fields = page.fields(visit)
    return show(visit, "operator/prices/page.html", "Price book", panels=BOOK, fields=fields)


@operator_page()
def version(visit: PageContext) -> HttpResponse:
    with visit.scope():
        head, row = detail.head(visit), detail.find(visit)
    is_draft = row.state == PriceVersion.State.DRAFT
    title = f"{head.version.title}, {head.version.whose}"
    return show(
        visit,
        "operator/prices/detail.html",
        title,
        panels=ONE,
        breadcrumbs=(_book(visit),),
        head=head,
        is_draft=is_draft,
    )


@operator_page(methods=FORM)
def model(visit: PageContext) -> HttpResponse:
    """Draft the prices of one model; in the address, those it has now."""
    form = forms.ModelPrices(posted(visit), _plain(visit))
    return _draft(visit, form, "Prices of a model", "operator/prices/model.html")


@operator_page(methods=FORM)
def upload(visit: PageContext) -> HttpResponse:
    """Draft prices as CSV; in the address, a model or version to begin with."""
    form = forms.Csv(posted(visit), visit.request.FILES or None, initial=_rows(visit))
    return _draft(visit, form, "Prices as CSV", "operator/prices/csv.html")


def _draft(visit: PageContext, form: forms.PriceBooksOwnerScope, title: str, template: str) -> HttpResponse:
    given = _given(visit)
    if visit.request.method == "POST":
        if carried := carry_out(form, lambda data: _propose(visit, data)):
            said = "Draft created. Another operator must publish it."
            return done(visit, visit.url("operator-prices-detail", carried.value.pk), said)
        return refused(visit, template, title, form, **given)
    return show(visit, template, title, form=form, **given)


def _propose(visit: PageContext, data: dict[str, Any]) -> PriceVersion:
    return do_propose_prices(
        data["proposal"],
        book=data["book"],
        tenant=data["tenant"],
        effective_from=data["since"],
        note=data["note"],
        created_by=visit.user,
    )


@operator_page(methods=FORM)
def public(visit: PageContext) -> HttpResponse:
    """Read the public file and say what of it is left out; what is taken continues as CSV, to be drafted."""
    form = forms.Public(posted(visit), visit.request.FILES or None)
    given, title = _given(visit), "Import public price file"
    if visit.request.method == "POST":
        if not form.is_valid():
            return refused(visit, "operator/prices/import.html", title, form, **given)
        read = form.cleaned_data["imported"]
        left = tuple(
            (label, rows[:LISTED], len(rows), max(0, len(rows) - LISTED))
            for label, rows in (
                ("Rounded to whole nano-USD" if read.rounded else "Skipped: not whole nano-USD", read.not_whole),
                ("Invalid: negative or not a number", read.refused),
                ("Models without a price per token", read.unpriced),
                ("Models listed as free", read.free),
                (
                    "Prices of unmetered usage",
                    [f"{k}: {n}" for k, n in read.other_fields.most_common()],
                ),
            )
            if rows
        )
        draft = forms.Csv(initial={"text": page.as_text(read.prices), "note": "Public price file"})
        models = len({price.model for price in read.prices})
        shown = given | {"action": visit.url("operator-prices-csv"), "left": left, "models": models}
        return show(
            visit, "operator/prices/import_confirmation.html", title, form=draft, prices=len(read.prices), **shown
        )
    return show(visit, "operator/prices/import.html", title, form=form, **given)


@operator_page(methods=FORM, step_up=True)
def publish(visit: PageContext) -> HttpResponse:
    with visit.scope():
        head, row = detail.head(visit), detail.find(visit)
    since = f"From {row.effective_from:%-d %B %Y, %H:%M} UTC" if row.effective_from else "From now"
    whom = head.version.whose if row.tenant_id is not None else f"all tenants on “{row.book.name}”"
    return ask(
        visit,
        f"Publish {head.version.title.lower()}",
        Confirm(f"publish {row.pk}", posted(visit)),
        lambda _: do_publish_prices(row, by=visit.user),
        submit="Publish",
        back=visit.url("operator-prices-detail", row.pk),
        said=lambda made: f"Version {made.number} of {made.book} was published.",
        breadcrumbs=(_book(visit),),
        effect=f"{since}, {head.prices} prices of {head.models} models apply to {whom}. Published prices never change."
        " A later version replaces them.",
        danger=True,
    )


@operator_page(methods=FORM, step_up=True)
def discard(visit: PageContext) -> HttpResponse:
    with visit.scope():
        row = detail.find(visit)
    return ask(
        visit,
        f"Discard draft {row.pk}",
        Confirm(f"discard {row.pk}", posted(visit)),
        lambda _: do_discard_prices(row, by=visit.user),
        submit="Discard",
        back=visit.url("operator-prices-detail", row.pk),
        said=lambda _: f"Draft {row.pk} was discarded.",
        breadcrumbs=(_book(visit),),
        effect="The draft stays readable and can be copied to a new draft. It can no longer be published.",
        danger=True,
    )


def _given(visit: PageContext) -> dict[str, Any]:
    return {"action": visit.request.path, "back": visit.url("operator-prices"), "breadcrumbs": (_book(visit),)}


def _book(visit: PageContext) -> Breadcrumb:
    return Breadcrumb("Price book", visit.url("operator-prices"))


def _whose(visit: PageContext) -> dict[str, Any]:
    now = page.asked(visit)
    return {"book": now.book, "tenant": now.tenant.slug if now.tenant else ""}


def _plain(visit: PageContext) -> dict[str, Any]:
    """Return what the form of a model begins with."""
    name, tier = visit.query.get("model", "")[:128], visit.query.get("tier", Tier.STANDARD.value)
    with visit.scope():
        begun = _whose(visit) | {"model": name, "tier": tier}
        rows = page.prices_at(page.asked(visit), visit.now).filter(model=name, tier=tier)
        found = page.as_new(rows) if name else []
    return begun | {price.component.value: page.usd(price.nano_per_million) for price in found}


def _rows(visit: PageContext) -> dict[str, Any]:
    """Return what the CSV begins with: a version's prices, or a model's."""
    name, copied = visit.query.get("model", "")[:128], visit.query.get("copy", "")
    with visit.scope():
        if copied.isascii() and copied.isdigit() and len(copied) < 18:
            row = PriceVersion.objects.select_related("book").filter(pk=int(copied)).first()
            if row is not None and row.body:
                theirs = Tenant.objects.all_tenants().filter(pk=row.tenant_id or 0)
                slug = theirs.values_list("slug", flat=True).first()
                proposal = parse(row.body)
                ended = "\n".join(f"{model},{tier.value}" for model, tier in proposal.withdrawn)
                begun = {"book": row.book.name, "tenant": slug or "", "note": row.note, "withdrawn": ended}
                return begun | {"text": page.as_text(proposal.prices)}
        rows = page.prices_at(page.asked(visit), visit.now).filter(model=name)
        found = page.as_new(rows) if name else []
        return _whose(visit) | {"text": page.as_text(found)}


urlpatterns = [
    path("operator/prices/", prices, name="operator-prices"),
    path("operator/prices/model", model, name="operator-prices-model"),
    path("operator/prices/csv", upload, name="operator-prices-csv"),
    path("operator/prices/import", public, name="operator-prices-import"),
    BOOK.operator_url("operator/prices/"),
    path("operator/prices/<int:version>/", version, name="operator-prices-detail"),
    path("operator/prices/<int:version>/publish", publish, name="operator-prices-publish"),
    path("operator/prices/<int:version>/discard", discard, name="operator-prices-discard"),
    ONE.operator_url("operator/prices/<int:version>/"),
]
