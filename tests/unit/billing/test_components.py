"""The declaration of token classes and price components, and everything that must agree with it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from django.db import models
from django.utils import translation

from billing.invoicing import corrected_prices
from billing.management.commands import usage_report
from billing.models import SUMMED, Adjustment, ExecutionCost, Price, UsageChange, UsageEvent, UsageRollup
from billing.rates.price_files import CSV_COLUMNS, read_csv
from billing.rates.pricing import COMPONENTS, METERED, PLAIN, Component, Rate, RateCard, Tier, price
from frontend.core.backend_messages import translate_message
from frontend.operator.prices.forms import ModelPricesForm
from inference_worker.contract.request import PROMPT_CLASSES, TOKEN_CLASSES, TOKEN_COLUMNS, TokenCounts
from millrace.cli.quotes import print_quote
from tools.generate_reference import price_components_table
from tools.openapi.formatting import read_yaml

ROOT = Path(__file__).parents[3]
SCHEMAS = read_yaml((ROOT / "docs" / "management-openapi.yaml").read_text(encoding="utf-8"))["components"]["schemas"]
REFERENCE = (ROOT / "docs" / "reference" / "prices.md").read_text(encoding="utf-8")
EACH = pytest.mark.parametrize("component", Component)
OF_REQUESTS = pytest.mark.parametrize("component", COMPONENTS)


def columns(model: type[models.Model]) -> set[str]:
    return {field.name for field in model._meta.get_fields()}


def test_prompt_and_token_classes_are_sums() -> None:
    for name in TOKEN_COLUMNS:
        counts = TokenCounts(**{name: 3})
        assert counts.prompt == 3 * (name in PROMPT_CLASSES)
        assert counts.total == 3 * (name in TOKEN_CLASSES)


@OF_REQUESTS
def test_tables_have_the_column(component: Component) -> None:
    for model in (UsageEvent, Adjustment, UsageRollup, UsageChange):
        assert component in columns(model)
    assert component in SUMMED
    assert (component in columns(ExecutionCost)) is (component in TOKEN_CLASSES)


@EACH
def test_the_price_model_and_the_api_document_have_the_component(component: Component) -> None:
    choices = dict(Price._meta.get_field("component").flatchoices)
    assert component in choices
    assert component in SCHEMAS["PriceComponent"]["enum"]
    assert (component in SCHEMAS["TokenComponent"]["enum"]) is (component in COMPONENTS)
    assert (component in SCHEMAS["MeteredComponent"]["enum"]) is (component in METERED)
    for schema in ("UsageTokens", "RequestUsage", "RequestExecution"):
        assert (component in SCHEMAS[schema]["properties"]) is (component in TOKEN_CLASSES)


@EACH
def test_the_price_form_has_a_field_with_the_label(component: Component) -> None:
    assert str(ModelPricesForm().fields[component.value].label) == component.label
    with translation.override("de"):
        assert str(ModelPricesForm().fields[component.value].label) == translate_message(component.label)
        assert translate_message(component.invoice_label) != component.invoice_label


@EACH
def test_price_files_accept_the_component(component: Component) -> None:
    proposal = read_csv([",".join(CSV_COLUMNS[:4]), f"m,standard,{component},1.5"])
    assert [(row.component, row.nano_per_million) for row in proposal.prices] == [(component, 1_500_000_000)]


@OF_REQUESTS
def test_a_request_is_priced_by_the_component(component: Component) -> None:
    plain = PLAIN[component]
    rates = tuple(Rate(place, each, 7 if each == component else 9) for place, each in enumerate(COMPONENTS))
    rated = price(RateCard(1, None, "m", Tier.STANDARD, 0, rates), TokenCounts(**{component: 10}), 0)
    assert rated.price_ids is not None
    assert [place for place, each in enumerate(rated.price_ids) if each is not None] == [COMPONENTS.index(component)]
    assert (rated.cost_femto, rated.saved_femto) == (70, 0 if plain == component else 20)
    assert PLAIN[plain] == plain


@OF_REQUESTS
def test_the_command_quotes_the_component(component: Component, tmp_path: Path) -> None:
    prices, usage = tmp_path / "prices.csv", tmp_path / "usage.json"
    prices.write_text("\n".join([",".join(CSV_COLUMNS[:4]), f"m,standard,{component},1", ""]))
    usage.write_text(json.dumps({"model": "m", "tokens": {component: 10}}))
    options = {"--rates": prices, "--usage": usage, "--at": "2026-11-01"}
    result = CliRunner().invoke(print_quote, [str(part) for option in options.items() for part in option])
    assert result.exit_code == 0, result.output
    assert re.search(rf"^{component} +10 ", result.output, re.MULTILINE)


def test_the_usage_report_has_a_column_for_each_token_class() -> None:
    assert set(TOKEN_CLASSES) <= set(usage_report._COUNTED)


@OF_REQUESTS
def test_corrected_prices_split_usage_by_component(component: Component) -> None:
    assert f"'{component}'" in corrected_prices._DIFFERENCES
    assert f"c.{component}" in corrected_prices._DIFFERENCES


@EACH
def test_the_reference_describes_the_component(component: Component) -> None:
    assert "<!-- generated: price-components -->" in REFERENCE
    (row,) = re.findall(rf"^\| `{component}` .*$", price_components_table(), re.MULTILINE)
    assert component.invoice_label in row
    assert f" {component.unit} |" in row
