"""`millrace price quote` with the published examples of providers, exact to the femto-USD."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from billing.rates.pricing import Tier
from millrace import cli
from tests.support.imports import ROOT

FILES = sorted((ROOT / "tests" / "data" / "price_conformance").glob("*.json"))
PROVIDERS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FILES}
CASES = [
    pytest.param(case, provider["price_lists"][case["prices"]], id=f"{name}: {case['name']}")
    for name, provider in PROVIDERS.items()
    for case in provider["cases"]
]
RATES = "model,tier,component,usd_per_million\nm,,uncached,3\nm,,output,15\n"


def femto(usd: str) -> int:
    exact = Decimal(usd).scaleb(15)
    assert exact == int(exact)
    return int(exact)


def quote(folder: Path, rates: str, usage: Any, at: str = "2026-03-01T16:30:00Z", *options: str) -> Result:
    (folder / "rates.csv").write_text(rates, encoding="utf-8")
    (folder / "usage.json").write_text(json.dumps(usage), encoding="utf-8")
    files = ["--rates", str(folder / "rates.csv"), "--usage", str(folder / "usage.json")]
    return CliRunner().invoke(cli.root, ["price", "quote", *files, "--at", at, *options])


def test_each_provider_has_cases():
    assert PROVIDERS.keys() == {"anthropic", "deepseek", "google", "openai"}
    for provider in PROVIDERS.values():
        cases = provider["cases"]
        assert {case["prices"] for case in cases} == provider["price_lists"].keys()  # no unused list
        assert len({case["name"] for case in cases}) == len(cases)
        for source in (*provider["price_lists"].values(), *cases):
            assert source["source"].startswith("https://")
            assert source["date"][:2] == "20"


@pytest.mark.parametrize(("case", "prices"), CASES)
def test_a_quote_equals_the_published_example(case, prices, tmp_path):
    result = quote(tmp_path, "\n".join(prices["rates"]), case["usage"], case["at"], "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {line["component"]: line["cost_femto"] for line in found["components"]} == {
        component: femto(usd) for component, usd in case["usd"].items()
    }
    assert {line["component"]: line["tokens"] for line in found["components"]} == case["usage"]["tokens"]
    assert found["cost_femto"] == femto(case["total_usd"]) == sum(map(femto, case["usd"].values()))
    assert Decimal(found["cost_usd"]) == Decimal(case["total_usd"])
    assert found["tier"] == case["usage"]["tier"]


def test_a_quote_is_a_table_without_json(tmp_path):
    usage = {"model": "m", "tokens": {"uncached": 1_000, "output": 2}}
    lines = quote(tmp_path, RATES, usage).stdout.splitlines()
    assert lines[1].split() == ["uncached", "1,000", "$3.00", "3,000,000,000,000"]
    assert lines[-1] == "Total: 3,030,000,000,000 femto-USD ($0.00303), tier standard"


def test_a_quote_is_in_the_currency_of_the_prices(tmp_path):
    usage = {"model": "m", "tokens": {"uncached": 1_000}}
    lines = quote(tmp_path, RATES, usage, "2026-03-01T16:30:00Z", "--currency", "jpy").stdout.splitlines()
    assert "JPY per million" in lines[0]
    assert lines[1].split() == ["uncached", "1,000", "JPY", "3", "3,000,000,000,000"]
    assert lines[-1] == "Total: 3,000,000,000,000 femto-JPY (JPY 0.003), tier standard"


def test_a_tier_without_prices_costs_the_standard_price(tmp_path):
    usage = {"model": "m", "tier": Tier.FLEX, "tokens": {"output": 1}}
    found = json.loads(quote(tmp_path, RATES, usage, "2026-03-01", "--json").stdout)
    assert (found["tier"], found["cost_femto"], found["at"]) == (
        Tier.STANDARD,
        15 * 10**9,
        "2026-03-01T00:00:00+00:00",
    )


@pytest.mark.parametrize(
    ("rates", "usage", "text"),
    [
        (RATES, {"model": "m", "tokens": {"cache_read": 1}}, "m (standard) has no price for cache_read"),
        (RATES, {"model": "m", "tokens": {"cached": 1}}, "usage.json: Invalid enum value 'cached'"),
        (RATES, {"model": "m", "tokens": {"output": 1.5}}, "usage.json: Expected `int`"),
        (RATES, {"model": "m", "tokens": {"output": -1}}, "usage.json: Expected `int` >= 0"),
        (RATES, {"model": "m", "tokens": {}, "time": ""}, "unknown field `time`"),
        (RATES, {"model": "x", "tokens": {"output": 1}}, "rates.csv: no price for the model 'x'"),
        (RATES + "m,,output,16\n", {"model": "m", "tokens": {}}, "two prices of output overlap"),
        (RATES + "m,,cache_read,free\n", {"model": "m", "tokens": {}}, "rates.csv: line 4"),
        ('model,"tier" x\n', {"model": "m", "tokens": {}}, "rates.csv: line 1"),
    ],
)
def test_invalid_files_are_rejected_with_the_reason(rates, usage, text, tmp_path):
    result = quote(tmp_path, rates, usage)
    assert (result.exit_code, result.stdout) == (1, "")
    assert text in result.stderr


def test_a_time_must_be_a_time(tmp_path):
    result = quote(tmp_path, RATES, {"model": "m", "tokens": {}}, "noon")
    assert result.exit_code == 2
    assert "'noon' is not a time" in result.stderr
