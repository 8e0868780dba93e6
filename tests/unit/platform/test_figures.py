"""The figures of README and docs/reference/performance.md are those of the committed results of `make bench-cpu`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.code_blocks import ROOT

README = ROOT / "README.md"
PERFORMANCE = ROOT / "docs" / "reference" / "performance.md"
COMPARISON = "## CPU engine compared with OpenVINO and vLLM"
RESULT = "2026-11-28-amd-epyc-2.json"
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
Row = dict[str, Any]
Table = list[list[str]]


@cache
def result(name: str) -> dict[str, Any]:
    return dict(json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8")))


def tables_of(page: Path, heading: str) -> list[Table]:
    """Return the rows of the tables below a heading, up to the next heading of any level. The titles come first."""
    text = page.read_text(encoding="utf-8")
    section = text.split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0]
    tables: list[Table] = []
    previous = ""
    for line in section.splitlines():
        if line.startswith("|"):
            if not previous.startswith("|"):
                tables.append([])
            if not line.startswith("|--"):
                tables[-1].append([cell.strip().replace("**", "") for cell in line.strip("|").split("|")])
        previous = line
    return tables


def find(rows: list[Row], **values: Any) -> Row:
    """Return the only row with these values."""
    (found,) = [row for row in rows if all(row.get(name) == value for name, value in values.items())]
    return found


def is_rounding(text: str, exact: float) -> bool:
    """Return whether a text such as `1,095` or `135.7` is the number, rounded to the digits that it has."""
    digits = text.replace(",", "")
    return abs(float(digits) - exact) <= 0.5000001 * 10 ** -len(digits.partition(".")[2])


def expected_served(name: str) -> Callable[[int], dict[str, float]]:
    rows = result(name)["served"]

    def expected(streams: int) -> dict[str, float]:
        bf16, int8, vllm = (
            find(rows, server=server, streams=streams) for server in ("millrace-bfloat16", "millrace-int8", "vllm")
        )
        rate = "tokens_per_second"
        return {
            "Millrace, bf16": bf16[rate],
            "Millrace, int8": int8[rate],
            "vLLM, bf16": vllm[rate],
            "bf16 ratio": bf16[rate] / vllm[rate],
            "int8 ratio": int8[rate] / vllm[rate],
            "ITL Millrace": bf16["itl_p95_ms"],
            "ITL vLLM": vllm["itl_p95_ms"],
        }

    return expected


def wrong_cells(cells: Iterator[tuple[str, float]]) -> list[str]:
    return [f"{text} is not {exact:.3f}" for text, exact in cells if not is_rounding(text, exact)]


def test_the_table_of_the_readme_is_in_the_newest_result_file() -> None:
    newest = max(path.name for path in RESULTS if "served" in result(path.name))
    text = README.read_text(encoding="utf-8")
    assert f"`benchmarks/results/{newest}`" in text
    machine = result(newest)["machine"]
    assert machine["cores"] == 2
    assert {"avx512_bf16", "avx512_vnni"} <= set(machine["instruction_sets"])
    assert "AVX-512 with bf16 and VNNI" in text
    expected = expected_served(newest)
    table = tables_of(README, "## Performance")[0]
    assert len(table) == 4

    def cells() -> Iterator[tuple[str, float]]:
        for streams, bf16, int8, vllm, latency in table[1:]:
            row = expected(int(streams))
            ours, _, theirs = latency.removesuffix(" ms").partition(" / ")
            yield from zip((bf16, int8, vllm, ours, theirs), [*row.values()][:3] + [*row.values()][5:], strict=True)

    assert wrong_cells(cells()) == []


def test_the_gateways_of_the_readme_are_those_of_the_page() -> None:
    page = {row[0]: row for row in tables_of(PERFORMANCE, "## Gateway overhead compared with other gateways")[0]}
    readme = tables_of(README, "## Performance")[1]
    assert len(readme) == 4
    for name, cpu, latency, rate in readme[1:]:
        row = page[name.partition(" ")[0].strip(",")]
        assert (cpu, latency, rate) == (row[5], row[1], row[2])


def test_the_served_rates_of_the_page_are_in_the_result_file() -> None:
    expected = expected_served(RESULT)
    table = tables_of(PERFORMANCE, COMPARISON)[1]

    def cells() -> Iterator[tuple[str, float]]:
        for streams, bf16, int8, vllm, ratio, ratio_int8, latency in table[1:]:
            ours, _, theirs = latency.removesuffix(" ms").partition(" / ")
            ratios = (each.partition(" ×")[0] for each in (ratio, ratio_int8))
            yield from zip((bf16, int8, vllm, *ratios, ours, theirs), expected(int(streams)).values(), strict=True)

    assert wrong_cells(cells()) == []


def test_the_rates_of_the_engine_are_in_the_result_file() -> None:
    rows = result(RESULT)["engine"]
    table = tables_of(PERFORMANCE, COMPARISON)[0]

    def cells() -> Iterator[tuple[str, float]]:
        for streams, bf16, openvino, ratio, int8, openvino_int8, ratio_int8 in table[1:]:
            given = [bf16, openvino, int8, openvino_int8]
            rates = [
                find(rows, system=system, type=kind, streams=int(streams))["tokens_per_second"]
                for kind in ("bfloat16", "int8")
                for system in ("millrace", "openvino")
            ]
            best = max(rates[1], rates[3])
            yield from zip(given, rates, strict=True)
            yield ratio.partition(" ×")[0], rates[0] / rates[1]
            yield ratio_int8.partition(" ×")[0], rates[2] / best

    assert wrong_cells(cells()) == []


def test_the_times_to_the_first_token_are_in_the_result_file() -> None:
    found = result(RESULT)
    table = tables_of(PERFORMANCE, COMPARISON)[2]
    inputs = {
        "prompts of 1,024": ("prefill", 0),
        "prompts of 640, of which 512 are shared": ("shared", 512),
        "prompts of 640, nothing shared": ("shared", 0),
    }

    def cells() -> Iterator[tuple[str, float]]:
        for prompts, streams, *given in table[1:]:
            section, shared = inputs[prompts]
            bf16, int8, vllm = (
                find(found[section], server=server, streams=int(streams), shared_prefix=shared)["ttft_p50_ms"]
                for server in ("millrace-bfloat16", "millrace-int8", "vllm")
            )
            texts = [each.removesuffix(" ms").partition(" ×")[0] for each in given]
            yield from zip(texts, (bf16, int8, vllm, bf16 / vllm, int8 / vllm), strict=True)

    assert wrong_cells(cells()) == []


@pytest.mark.parametrize(
    ("text", "exact", "is_same"),
    [("1,095", 1094.52, True), ("1,023", 1094.52, False), ("135.7", 135.74, True), ("135.7", 135.8, False)],
)
def test_a_figure_has_the_digits_of_its_result(text: str, exact: float, is_same: bool) -> None:
    assert is_rounding(text, exact) is is_same
