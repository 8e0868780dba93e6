"""Numbers as people read them, without floats: the exact value stays next to every rounded one."""

from __future__ import annotations

_UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))


def exact(value: int) -> str:
    """Every digit, in groups of three: 12,510,000."""
    return f"{value:,}"


def compact(value: int) -> str:
    """At most four digits, cut and never rounded up: 999, 12.5K, 9.49M."""
    for unit, name in _UNITS:
        if value >= unit:
            places = 2 if value < 10 * unit else 1 if value < 100 * unit else 0
            whole, rest = divmod(value * 10**places // unit, 10**places)
            return f"{whole}.{rest:0{places}}{name}" if places else f"{whole}{name}"
    return str(value)


def share(part: int, whole: int) -> str:
    """A part of the whole in percent with one place, cut: 60.4%. A dash if there is no whole."""
    if whole <= 0:
        return "–"
    tenths = part * 1000 // whole
    return f"{tenths // 10}.{tenths % 10}%"


def duration(microseconds: int) -> str:
    """A time in the unit it is best read in: 184 ms, 2.31 s."""
    milliseconds = microseconds // 1000
    if milliseconds < 1000:
        return f"{milliseconds} ms"
    hundredths = milliseconds // 10
    return f"{hundredths // 100}.{hundredths % 100:02} s"
