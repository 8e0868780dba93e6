"""Price CSVs: windows that pass midnight, and percentages of other rows."""

from __future__ import annotations

import pytest

from billing.rates.price_book import check, unpriced_hours
from billing.rates.price_files import CSV_COLUMNS, read_csv

HEADING = ",".join(CSV_COLUMNS)


def prices(*lines: str) -> list[tuple[str, int, int, int]]:
    found = read_csv([HEADING, *lines]).prices
    return [(row.component.value, row.nano_per_million, row.from_minute, row.until_minute) for row in found]


def test_a_window_that_passes_midnight_becomes_two():
    assert prices("m,,uncached,1,,,22:30,06:00", "m,,uncached,2,,,06:00,22:30") == [
        *(("uncached", 10**9, 1350, 1440), ("uncached", 10**9, 0, 360), ("uncached", 2 * 10**9, 360, 1350)),
    ]
    assert prices("m,,uncached,1,,,22:00,00:00") == [("uncached", 10**9, 1320, 1440)]
    with pytest.raises(ValueError, match="line 2: from_time and until_time are equal"):
        prices("m,,uncached,1,,,10:00,10:00")


def test_a_price_can_be_a_percentage_of_another_row():
    """The order of rows does not matter, and each window takes the price of its own."""
    found = prices(
        *("m,,cache_read,10% of uncached,,,22:00,06:00", "m,,cache_read,12.5% of uncached,,,06:00,22:00"),
        *("m,,uncached,0.80,,,22:00,06:00", "m,,uncached,3,,,06:00,22:00"),
    )
    assert found[3:] == [
        *(("cache_read", 80_000_000, 1320, 1440), ("cache_read", 80_000_000, 0, 360)),
        ("cache_read", 375_000_000, 360, 1320),
    ]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["m,,cache_read,10% of uncached"], "line 2: there is no price of uncached"),
        (["m,,uncached,1", "m,batch,cache_read,10% of uncached"], "line 3: there is no price of uncached"),
        (["m,,uncached,0.000000001", "m,,cache_read,10% of uncached"], "line 3: .* no whole nano-USD"),
        (["m,,cache_read,50% of cache_read"], "line 2: there is no price of cache_read"),
        (["m,,uncached,1", "m,,cache_read,10% of nothing"], "line 3"),
        (["m,,uncached,10%"], "line 2"),
    ],
)
def test_wrong_percentages_name_the_line(lines, problem):
    with pytest.raises(ValueError, match=problem):
        prices(*(line + "," * (7 - line.count(",")) for line in lines))


def test_hours_without_a_price_are_found():
    def gaps(*lines: str) -> list[str]:
        return unpriced_hours(read_csv([HEADING, *(line + "," * (7 - line.count(",")) for line in lines)]).prices)

    assert gaps("m,,uncached,1", "m,,output,1,,,08:00,20:00", "m,,output,2,,,20:00,08:00") == []
    assert gaps("m,,uncached,1,,,08:00,20:00", "m,,uncached,1,,,21:00,24:00") == [
        "m (standard): uncached from 00:00 to 08:00 UTC",
        "m (standard): uncached from 20:00 to 21:00 UTC",
    ]
    assert gaps("m,,uncached,1,0,1000", "m,,uncached,1,1000,,00:00,20:00") == [
        "m (standard): uncached of prompts from 1000 tokens from 20:00 to 24:00 UTC",
    ]


def schedule(*lines: str) -> list[tuple[int, int, int, int, str]]:
    return [row.ranges[2:] for row in read_csv([HEADING, *lines]).prices]


def test_weekdays_and_a_time_zone():
    assert schedule("m,,uncached,1,,,09:00,17:00,mon-fri,Europe/Berlin") == [(540, 1020, 0, 5, "Europe/Berlin")]
    assert schedule("m,,uncached,1,,,,,sat,") == [(0, 1440, 5, 6, "UTC")]
    assert schedule("m,,uncached,1,,,,,sat-mon,") == [(0, 1440, 5, 7, "UTC"), (0, 1440, 0, 1, "UTC")]


def test_a_window_that_passes_midnight_ends_on_the_next_weekday():
    assert schedule("m,,uncached,1,,,22:00,06:00,mon-fri,") == [(1320, 1440, 0, 5, "UTC"), (0, 360, 1, 6, "UTC")]
    assert schedule("m,,uncached,1,,,22:00,06:00,sun,") == [(1320, 1440, 6, 7, "UTC"), (0, 360, 0, 1, "UTC")]
    assert schedule("m,,uncached,1,,,22:00,06:00,sat-sun,") == [
        *((1320, 1440, 5, 7, "UTC"), (0, 360, 6, 7, "UTC"), (0, 360, 0, 1, "UTC")),
    ]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["m,,uncached,1,,,,,monday,"], "line 2: 'monday' are no weekdays"),
        (["m,,uncached,1,,,,,,Mars/Base"], "'Mars/Base' is no time zone"),
        (["m,,uncached,1,,,,,mon-wed,", "m,,uncached,2,,,,,wed-sun,"], "two prices of uncached overlap"),
        (["m,,uncached,1,,,,,mon,", "m,,uncached,2,,,,,tue-sun,Asia/Tokyo"], "have several time zones"),
    ],
)
def test_wrong_schedules_are_rejected(lines, problem):
    with pytest.raises(ValueError, match=problem):
        check(read_csv([HEADING, *lines]))


def test_weekdays_without_a_price_are_found():
    found = read_csv([HEADING, "m,,uncached,1,,,,,mon-fri,", "m,,uncached,1,,,08:00,24:00,sat-sun,"])
    assert unpriced_hours(found.prices) == [
        f"m (standard): uncached from 00:00 to 08:00 UTC on {day}" for day in ("sat", "sun")
    ]
