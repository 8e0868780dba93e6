"""The number grammar of the console as a table, for `frontend/core/numbers.py` and for `numbers.js`.

| number | rule |
|---|---|
| all | half up |
| count | exact up to 99,999, three digits above |
| percent | one decimal, two below 1%, none from 1,000% |
| money | the decimals of the currency, up to six below the smallest amount with them |

Each case is the function's name in `numbers.js`, its arguments, and the text in English and in German.
"""

from __future__ import annotations

_NBSP = "\N{NO-BREAK SPACE}"

COUNTS: tuple[tuple[int, str, str], ...] = (
    (0, "0", "0"),
    (999, "999", "999"),
    (1000, "1,000", "1.000"),
    (11_970, "11,970", "11.970"),
    (99_999, "99,999", "99.999"),
    (100_000, "100K", "100K"),
    (123_456, "123K", "123K"),
    (123_500, "124K", "124K"),
    (999_499, "999K", "999K"),
    (999_500, "1.00M", "1,00M"),
    (9_494_999, "9.49M", "9,49M"),
    (9_495_000, "9.50M", "9,50M"),
    (9_995_000, "10.0M", "10,0M"),
    (99_950_000, "100M", "100M"),
    (8 * 10**9, "8.00B", "8,00B"),
    (999_500_000_000, "1.00T", "1,00T"),
    (10**15, "1,000T", "1.000T"),
)
SHARES: tuple[tuple[int, int, str, str], ...] = (
    (604, 1000, "60.4%", "60,4%"),
    (1, 3, "33.3%", "33,3%"),
    (2, 3, "66.7%", "66,7%"),
    (5, 5, "100.0%", "100,0%"),
    (999, 1000, "99.9%", "99,9%"),
    (0, 9, "0.00%", "0,00%"),
    (47, 10_000, "0.47%", "0,47%"),
    (1, 213, "0.47%", "0,47%"),
    (99, 10_000, "0.99%", "0,99%"),
    (9_949, 10**6, "0.99%", "0,99%"),
    (9_950, 10**6, "1.0%", "1,0%"),
    (1, 10**6, "<0.01%", "<0,01%"),
    (18_504, 1000, "1,850%", "1.850%"),
    (99_994, 10_000, "999.9%", "999,9%"),
    (99_996, 10_000, "1,000%", "1.000%"),
)
DURATIONS: tuple[tuple[int, str, str], ...] = (
    (0, "0 ms", "0 ms"),
    (499, "0 ms", "0 ms"),
    (500, "1 ms", "1 ms"),
    (184_000, "184 ms", "184 ms"),
    (999_499, "999 ms", "999 ms"),
    (999_500, "1.00 s", "1,00 s"),
    (2_314_999, "2.31 s", "2,31 s"),
    (2_315_000, "2.32 s", "2,32 s"),
    (1_234_000_000, "1,234.00 s", "1.234,00 s"),
)
# Millionths of a unit, the currency, the symbol of its amounts and its decimals.
AMOUNTS: tuple[tuple[int, str, str, int, str, str], ...] = (
    (0, "USD", "$", 2, "$0.00", f"0,00{_NBSP}$"),
    (1, "USD", "$", 2, "$0.000001", f"0,000001{_NBSP}$"),
    (4_074, "USD", "$", 2, "$0.004074", f"0,004074{_NBSP}$"),
    (4_100, "USD", "$", 2, "$0.0041", f"0,0041{_NBSP}$"),
    (10_000, "USD", "$", 2, "$0.01", f"0,01{_NBSP}$"),
    (14_999, "USD", "$", 2, "$0.01", f"0,01{_NBSP}$"),
    (15_000, "USD", "$", 2, "$0.02", f"0,02{_NBSP}$"),
    (1_234_567_890, "USD", "$", 2, "$1,234.57", f"1.234,57{_NBSP}$"),
    (42_000, "JPY", "JPY ", 0, "JPY 0.042", f"0,042{_NBSP}JPY"),
    (1_500_000, "JPY", "JPY ", 0, "JPY 2", f"2{_NBSP}JPY"),
    (1_499, "KWD", "KWD ", 3, "KWD 0.001", f"0,001{_NBSP}KWD"),
    (500, "KWD", "KWD ", 3, "KWD 0.0005", f"0,0005{_NBSP}KWD"),
)
# Millionths of a dollar, the decimals of the column.
COLUMNS: tuple[tuple[int, int, str, str], ...] = (
    (4_074, 6, "$0.004074", f"0,004074{_NBSP}$"),
    (4_074, 4, "$0.0041", f"0,0041{_NBSP}$"),
    (4, 4, "<$0.0001", f"<0,0001{_NBSP}$"),
    (0, 4, "$0.0000", f"0,0000{_NBSP}$"),
)
# Calls of `numbers.js` with the texts in both languages.
SCRIPT_CASES: tuple[tuple[str, tuple[object, ...], str, str], ...] = (
    *(("count", (value,), *texts) for value, *texts in COUNTS),
    *(("share", (part, whole), *texts) for part, whole, *texts in SHARES),
    *(("duration", (time,), *texts) for time, *texts in DURATIONS),
    *(("money", (amount, symbol, digits), *texts) for amount, _currency, symbol, digits, *texts in AMOUNTS),
    *(("amount", (amount, 6, places, "$"), *texts) for amount, places, *texts in COLUMNS),
)
