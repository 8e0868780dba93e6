"""The prices of the cross-encoder of a running platform."""

from __future__ import annotations

import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import httpx2

from millrace.environment.configuration import read_env_file
from tests.support.stack import RERANK_MODEL, Stack, eventually

USD_PER_MILLION = Decimal("0.05")
USD_PER_SEARCH = Decimal("0.002")
PUBLISH = f"""
from billing.pricing.prices import do_propose_prices, do_publish_prices
from billing.rates.price_book import NewPrice, Proposal, nano_per_million
from billing.rates.pricing import Component, Tier
prices = tuple(
    NewPrice("{RERANK_MODEL}", Tier.STANDARD, component, nano_per_million(usd))
    for component, usd in ((Component.UNCACHED, "{USD_PER_MILLION}"), (Component.SEARCHES, "{USD_PER_SEARCH * 10**6}"))
)
do_publish_prices(do_propose_prices(Proposal(prices)), by=None)
"""


def publish_price(stack: Stack) -> None:
    """Publish the prices, and wait until the gateway uses it."""
    environ = read_env_file(stack.data_dir / "env") | {"MILLRACE_DATA_DIR": str(stack.data_dir)}
    manage = [sys.executable, str(Path(__file__).parents[3] / "manage.py"), "shell", "--no-imports", "-c", PUBLISH]
    subprocess.run(manage, env=environ, check=True, timeout=120)
    body = {"model": RERANK_MODEL, "query": "a", "documents": ["b"]}
    url = f"{stack.url}/v1/rerank"
    eventually(lambda: httpx2.post(url, json=body, headers=stack.headers, timeout=60).status_code == 200)
