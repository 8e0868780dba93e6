"""Guards: differences between two questions that change the answer although the questions are similar.

Each guard compares what it finds in both texts: numbers, units, dates, negations, names, code and the language. A
cached answer is not served if a guard finds a difference. The guards are pure and need time linear in the texts.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise

MAX_GUARDED_CHARACTERS = 8192  # longer questions are always reported as different
TOO_LONG = "too_long"

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
_SENTENCE_START = re.compile(r"(?:\A|[.!?:;\n\"“(]\s{0,4})([^\W\d_]+)")
_NUMBER = re.compile(r"(?<![\w.])\d+(?:[.,:]\d+)*(?:st|nd|rd|th)?(?![\d])", re.IGNORECASE)
_ORDINAL = re.compile(r"(?:st|nd|rd|th)\Z", re.IGNORECASE)
_GROUPS = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?\Z")
_ISO_DATE = re.compile(r"(?<!\d)\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}(?!\d)")
_UNIT_AFTER_NUMBER = re.compile(r"\d\s?(%|°\s?[CF]\b|[^\W\d_]{1,12})")
_CODE_SPAN = re.compile(r"(?<!`)`{1,3}([^`]+)`")
_IDENTIFIER = re.compile(
    r"https?://\S+|(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,64}\.[\w.]{1,64}|\b\w+_\w+\b"
    r"|\b[a-z]+[A-Z]\w*|\b\w+\(\)|(?<!\w)--?[a-z][\w-]*"
    r"|(?<!\w)[.~]?/[\w./-]+|\b\w+\.(?:py|js|ts|go|rs|java|cpp|json|yaml|sql|html|css|sh)\b"
)
_PUNCTUATION = ".,;:!?)]}\"'"

_COUNTED = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
_NUMBER_WORDS = {
    word: str(value)
    for value, word in enumerate(_COUNTED.split())
    if word != "one"  # often a pronoun
} | {"thirty": "30", "forty": "40", "fifty": "50", "hundred": "100", "thousand": "1000", "million": "1000000"}
_NUMBER_WORDS |= {"twice": "2", "first": "1", "second": "2", "third": "3", "half": "0.5", "double": "2"}
_CURRENCIES = {
    "$": "usd", "€": "eur", "£": "gbp", "¥": "jpy", "₹": "inr", "usd": "usd", "eur": "eur", "gbp": "gbp", "jpy": "jpy",
    "inr": "inr", "chf": "chf", "aud": "aud", "cad": "cad", "dollar": "usd", "dollars": "usd", "euro": "eur",
    "euros": "eur", "pound": "gbp", "pounds": "gbp", "yen": "jpy", "rupee": "inr", "rupees": "inr",
}  # fmt: skip
_UNITS = _CURRENCIES | {
    "km": "km", "kilometer": "km", "kilometers": "km", "kilometre": "km", "kilometres": "km", "mile": "mile",
    "miles": "mile", "mi": "mile", "m": "m", "meter": "m", "meters": "m", "metre": "m", "metres": "m", "cm": "cm",
    "mm": "mm", "inch": "inch", "inches": "inch", "ft": "foot", "foot": "foot", "feet": "foot", "yard": "yard",
    "yards": "yard", "kg": "kg", "kilogram": "kg", "kilograms": "kg", "g": "g", "gram": "g", "grams": "g", "mg": "mg",
    "lb": "lb", "lbs": "lb", "ounce": "oz", "ounces": "oz", "oz": "oz", "celsius": "c", "fahrenheit": "f",
    "kelvin": "k", "liter": "l", "liters": "l", "litre": "l", "litres": "l", "ml": "ml", "gallon": "gal",
    "gallons": "gal", "second": "s", "seconds": "s", "minute": "min", "minutes": "min", "hour": "h", "hours": "h",
    "day": "day", "days": "day", "week": "week", "weeks": "week", "month": "month", "months": "month", "year": "year",
    "years": "year", "percent": "%", "%": "%", "kb": "kb", "mb": "mb", "gb": "gb", "tb": "tb", "ms": "ms", "mph": "mph",
    "kmh": "kmh", "hz": "hz", "khz": "khz", "mhz": "mhz", "ghz": "ghz", "watt": "w", "watts": "w", "kw": "kw",
}  # fmt: skip
_ALWAYS_UNITS = frozenset(_CURRENCIES) | {"celsius", "fahrenheit", "kelvin", "percent", "%", "°c", "°f"}
_DATES = {
    "today", "tomorrow", "yesterday", "tonight", "monday", "tuesday", "wednesday", "thursday", "friday", "saturday",
    "sunday", "weekend", "january", "february", "march", "april", "june", "july", "august", "september", "october",
    "november", "december", "morning", "afternoon", "evening", "noon", "midnight", "spring", "summer", "autumn",
    "winter", "christmas", "easter",
}  # fmt: skip
_MONTH_MAY = re.compile(r"\bMay\b(?!\s+(?:i|we|you)\b)", re.IGNORECASE)
_RELATIVE = re.compile(
    r"\b(last|next|previous|past|coming)\s+(day|week|weekend|month|quarter|year|night)\b", re.IGNORECASE
)
_NEGATIONS = {
    "not", "no", "never", "none", "nothing", "nobody", "nowhere", "neither", "nor", "without", "cannot", "except",
    "unable", "isnt", "arent", "wasnt", "werent", "dont", "doesnt", "didnt", "wont", "cant", "couldnt", "shouldnt",
    "wouldnt", "hasnt", "havent", "hadnt", "nicht", "kein", "keine", "nie", "ohne", "jamais", "sans", "nunca", "sin",
}  # fmt: skip
_STOP_WORD_TEXTS = {
    "en": "the a an is are was to of in my i you how what do does can and for with it this that",
    "de": "der die das ein eine ist sind war zu von im mein ich sie wie was kann und für mit es",
    "fr": "le la les un une est sont de du des mon ma je vous comment que et pour avec ce dans puis",
    "es": "el la los las un una es son de del mi yo usted cómo qué puedo y para con esto en por",
    "it": "il lo la gli un una è sono di del mio io come che posso e per con questo in",
    "pt": "o os as um uma é são de do da meu eu você como que posso e para com isto em",
}
_STOP_WORDS = {language: frozenset(words.split()) for language, words in _STOP_WORD_TEXTS.items()}
MIN_STOP_WORDS = 2  # stop words of a language, more than of any other


def differences(first: str, second: str) -> list[str]:
    """Return the names of the guards that find a difference between two questions."""
    if max(len(first), len(second)) > MAX_GUARDED_CHARACTERS:
        return [TOO_LONG]
    return [name for name, differ in GUARDS.items() if differ(first, second)]


def numbers(text: str) -> Counter[str]:
    """Return the numbers of a text, written in digits or words."""
    found: Counter[str] = Counter()
    for match in _NUMBER.findall(_ISO_DATE.sub(" ", text)):
        number = _ORDINAL.sub("", match)
        if _GROUPS.match(number):
            number = number.replace(",", "")
        found[_canonical_number(number)] += 1
    for word in _words(text):
        if word in _NUMBER_WORDS:
            found[_NUMBER_WORDS[word]] += 1
    return found


def units(text: str) -> set[str]:
    """Return the currencies of a text, and the other units that follow a number."""
    words = _words(text)
    found = {_UNITS[word] for word in words if word in _ALWAYS_UNITS and word in _UNITS}
    found |= {_CURRENCIES[sign] for sign in text if sign in _CURRENCIES}
    for unit in _UNIT_AFTER_NUMBER.findall(text):
        name = unit.lower().replace(" ", "")
        if name.startswith("°"):
            found.add(name[1:])
        elif name in _UNITS:
            found.add(_UNITS[name])
    found |= {_UNITS[unit] for number, unit in pairwise(words) if _is_number(number, unit)}
    return found


def dates(text: str) -> set[str]:
    """Return the calendar dates, months, days of the week and relative times of a text."""
    found = {word for word in _words(text) if word in _DATES}
    found |= set(_ISO_DATE.findall(text)) | {" ".join(pair).lower() for pair in _RELATIVE.findall(text)}
    if any(match.group() == "May" and match.start() for match in _MONTH_MAY.finditer(text)):
        found.add("may")
    return found


def is_negated(text: str) -> bool:
    """Return whether a text has an odd number of negations."""
    count = 0
    for word in _words(text):
        count += word in _NEGATIONS or word.endswith(("n't", "n’t"))
    return count % 2 == 1


def names(text: str) -> set[str]:
    """Return the words that are names by their spelling: capitalized inside of a sentence."""
    starts = {match.start(1) for match in _SENTENCE_START.finditer(text)}
    letters = [letter for letter in text if letter.isalpha()]
    if sum(letter.isupper() for letter in letters) * 2 > len(letters):  # written in capitals
        return set()
    found = set()
    for match in _WORD.finditer(text):
        word = match.group()
        is_acronym = len(word) > 1 and word.isupper()
        if (is_acronym or (word[0].isupper() and match.start() not in starts)) and _is_name(word):
            found.add(_singular(word.lower()))
    return found


def code(text: str) -> set[str]:
    """Return the identifiers, paths, URLs and code spans of a text."""
    found = {" ".join(span.split()) for span in _CODE_SPAN.findall(text)}
    return found | {match.rstrip(_PUNCTUATION) for match in _IDENTIFIER.findall(_CODE_SPAN.sub(" ", text))}


def language(text: str) -> str:
    """Return the script of a text and, for Latin scripts, its language; empty if they are not clear."""
    scripts = Counter(unicodedata.name(letter, "?").split(" ", 1)[0] for letter in text if letter.isalpha())
    if not scripts:
        return ""
    script, count = scripts.most_common(1)[0]
    if script != "LATIN":
        return script.lower() if count * 2 > scripts.total() else ""
    words = _words(text)
    hits = sorted(((sum(word in known for word in words), name) for name, known in _STOP_WORDS.items()), reverse=True)
    (most, name), (next_most, _) = hits[:2]
    return name if most - next_most >= MIN_STOP_WORDS else ""


def _numbers_differ(first: str, second: str) -> bool:
    return numbers(first) != numbers(second)


def _units_differ(first: str, second: str) -> bool:
    return units(first) != units(second)


def _dates_differ(first: str, second: str) -> bool:
    return dates(first) != dates(second)


def _negation_differs(first: str, second: str) -> bool:
    return is_negated(first) != is_negated(second)


def _names_differ(first: str, second: str) -> bool:
    """Return whether a name of one text is not a word of the other one, in any spelling."""
    words = [{_singular(word) for word in _words(text)} for text in (first, second)]
    return bool(names(first) - words[1] or names(second) - words[0])


def _code_differs(first: str, second: str) -> bool:
    return code(first) != code(second)


def _language_differs(first: str, second: str) -> bool:
    found = language(first), language(second)
    return all(found) and found[0] != found[1]


GUARDS: Mapping[str, Callable[[str, str], bool]] = {
    "numbers": _numbers_differ,
    "units": _units_differ,
    "dates": _dates_differ,
    "negation": _negation_differs,
    "names": _names_differ,
    "code": _code_differs,
    "language": _language_differs,
}


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


def _canonical_number(number: str) -> str:
    """Return a number without leading zeros, and without zeros at the end of its decimals."""
    if "." in number and number.count(".") == 1 and ":" not in number and "," not in number:
        number = number.rstrip("0").rstrip(".")
    return number.lstrip("0") or "0"


def _is_number(word: str, unit: str) -> bool:
    return word in _NUMBER_WORDS and unit in _UNITS


def _is_name(word: str) -> bool:
    lower = word.lower()
    return lower != "i" and not lower.startswith(("i'", "i’")) and lower not in _DATES and lower not in _UNITS


def _singular(word: str) -> str:
    word = word.removesuffix("'s").removesuffix("’s")
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
