"""Any text is printed on an invoice as far as its fonts have it, and never prevents the PDF."""

from __future__ import annotations

import io
import json
import random
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pikepdf
import pytest
import typst
from wcwidth import iter_graphemes

from billing.invoicing import glyphs, pdf

NAMES = json.loads(Path("tests/data/language_names/language_names.json").read_text())
PRINTED = {
    *("Arab", "Armn", "Beng", "Cyrl", "Deva", "Ethi", "Geor", "Grek", "Gujr", "Guru", "Hang", "Hani", "Hebr"),
    *("Khmr", "Knda", "Laoo", "Latn", "Mlym", "Mymr", "Orya", "Sinh", "Taml", "Telu", "Thai"),
}
FAMILY = "👩\N{ZERO WIDTH JOINER}👩\N{ZERO WIDTH JOINER}👧"
NASTY = (
    "\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}\N{VARIATION SELECTOR-15}\N{VARIATION SELECTOR-16}\N{SOFT HYPHEN}"
    "\N{COMBINING ENCLOSING KEYCAP}\N{COMBINING GRAPHEME JOINER}\N{HANGUL FILLER}\N{ARABIC LETTER MARK}\u25cc"
    "\N{RIGHT-TO-LEFT OVERRIDE}\N{LEFT-TO-RIGHT ISOLATE}\N{POP DIRECTIONAL FORMATTING}\N{WORD JOINER}\ufeff\ufff9"
    "\U0001f1e9\U0001f1ea\U0001f3fd\U0001f469\U0001f44d\u2764\U0001f3f4\U000e0067\U000e007f"
    " \t\n\r\x00\x1f\x7f\x85\u2028\u3000"
)


def invoice(texts: list[str]) -> dict[str, Any]:
    """Return the document of an invoice with these texts in its parties, lines, notes, reason and payment details."""
    name, *more = texts
    where = dict(zip(("street", "city", "region", "postcode"), more[:4], strict=False))
    party = {
        "street": "",
        "postcode": "",
        "city": "",
        "region": "",
        "vat_id": "",
        **where,
        "name": name,
        "country": "TH",
    }
    line = {"line_type": "one_off", "model": "", "tier": "", "component": "", "nano_per_million": None, "cents": 1}
    return {
        "number": "INV-2026-000001",
        "invoice_type": "invoice",
        "issued_at": "2026-11-01T09:00:00Z",
        "due_on": "2026-11-15",
        "currency": "USD",
        "period": {"starts_at": "2026-10-01T00:00:00Z", "ends_at": "2026-11-01T00:00:00Z", "time_zone": "UTC"},
        "refers_to": None,
        "reason": name,
        "seller": {**party, "registration": "", "payment_details": "\n".join(more)},
        "buyer": {**party, "po_number": name},
        "lines": [{**line, "position": number, "description": text} for number, text in enumerate(texts, 1)],
        "subtotal": 1,
        "credits": [{"label": name, "cents": 1}],
        "taxable": 1,
        "taxes": [{"category": "S", "rate_ppm": 0, "label": "VAT", "note": name, "base": 1, "tax": 0}],
        "total": 1,
        "saved_femto": "0",
        "display": None,
    }


def random_texts(count: int, seed: int) -> Iterator[str]:
    """Yield texts of letters of one script with marks, joiners, controls and any other characters between them."""
    rand = random.Random(seed)
    fonts = [sorted(map(chr, glyphs._characters(path))) for path in glyphs._font_files()]
    marks = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)).startswith("M")]
    for _ in range(count):
        script = rand.choice(fonts)
        kinds = (script, script, script, marks, NASTY, rand.choice(fonts))
        yield "".join(
            rand.choice(rand.choice(kinds))
            if rand.random() < 0.9
            else chr(rand.choice((rand.randrange(0xE000, 0x110000), 0x6A)))
            for _ in range(rand.randrange(1, 40))
        )


@pytest.fixture(autouse=True)
def only_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let no test pass by the second attempt, in ASCII. Return a list with an item for each typesetting."""
    calls: list[int] = []
    compile_once = typst.compile

    def count(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return compile_once(*args, **options)

    monkeypatch.setattr(pdf, "_ascii", lambda text: pytest.fail(f"typeset in ASCII: {text!r}"))
    monkeypatch.setattr(typst, "compile", count)
    return calls


def fonts_of(made: bytes) -> set[str]:
    with pikepdf.open(io.BytesIO(made)) as file:
        names = (
            str(item["/BaseFont"])
            for item in file.objects
            if isinstance(item, pikepdf.Dictionary) and "/BaseFont" in item
        )
        return {name.partition("+")[2].partition("-Identity")[0] for name in names}


@pytest.mark.parametrize("script", sorted(NAMES))
def test_an_invoice_in_each_script_of_cldr(script):
    names = NAMES[script]
    made = pdf.render_pdf(invoice(names))
    assert made.startswith(b"%PDF-")
    assert {glyphs.printable(name) == name for name in names} == {script in PRINTED}
    if script not in PRINTED:
        assert all(set(glyphs.printable(name)) <= {"?", " "} for name in names)
    elif script not in ("Latn", "Grek", "Cyrl", "Hebr"):  # Libertinus Serif
        assert any("Noto" in name for name in fonts_of(made))


def test_random_texts_are_typeset_once(only_once):
    texts = list(random_texts(2_000, seed=1))
    for start in range(0, len(texts), 100):
        pdf.render_pdf(invoice(texts[start : start + 100]))
    assert len(only_once) == 20


@pytest.mark.slow
def test_each_random_text_alone():
    for text in random_texts(2_000, seed=2):
        pdf.render_pdf(invoice([text]))


def test_every_character_of_the_fonts_is_typeset():
    """Only what needs a base, such as marks and skin tones, and controls are not printed by themselves."""
    fonts = map(chr, set().union(*map(glyphs._characters, glyphs._font_files())))
    characters = sorted(each for each in fonts if next(iter_graphemes(f"a{each}")) == "a" and each.isprintable())
    assert len(characters) > 50_000
    assert [each for each in characters if glyphs.printable(each) != each] == []
    for start in range(0, len(characters), 5_000):
        texts = ["".join(characters[at : at + 100]) for at in range(start, min(start + 5_000, len(characters)), 100)]
        pdf.render_pdf(invoice(texts))


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("กำแพง กรุงเทพฯ", "กำแพง กรุงเทพฯ"),
        (f"Acme {FAMILY} 👍🏽 🇩🇪 1️⃣", f"Acme {FAMILY} 👍🏽 🇩🇪 1️⃣"),
        ("ད\u0f72ང\u0f7c x", "?? x"),  # Tibetan syllables: one mark for a base with its vowel
        ("a\u0bbe b", "? b"),  # no font has both
        ("e\u0301 \u1112\u1161\u11ab", "e\u0301 \u1112\u1161\u11ab"),
        ("a" + "\u0301" * 40, "?"),
        ("\u0301a\n\u05b4", "?a\n?"),  # marks without a base
        ("one\r\ntwo\u2028three\tfour\u00a0five", "one\ntwo\nthree four\u00a0five"),
        ("\x00\x1b\ue000\uffff\U0001fffe\U000e0001", "??????"),
        ("\u202eegral\u202c \u2067\u05d0\u2069", "egral \u05d0"),
        ("", ""),
    ],
)
def test_whole_clusters_are_replaced(text, printed):
    assert glyphs.printable(text) == printed
    pdf.render_pdf(invoice([text]))


def test_unsupported_characters_cost_no_further_typesetting(only_once):
    """700 of them took 700 typesettings, 11 s."""
    pdf.render_pdf(invoice(["".join(chr(0x12000 + number) for number in range(700))]))
    assert only_once == [1]


def test_a_character_that_the_maps_promised_in_vain_is_typeset_in_ascii(monkeypatch, only_once):
    monkeypatch.setattr(pdf, "printable", lambda text: text)
    monkeypatch.setattr(pdf, "_ascii", lambda text: pdf._NOT_ASCII.sub("?", text))
    assert pdf.render_pdf(invoice(["ཀ\u0f72 Acme"])).startswith(b"%PDF-")
    assert only_once == [1, 1]


def test_the_template_names_the_fonts_that_are_read():
    fonts = pdf._fonts().fonts()
    families = {font.family for font in fonts if font.path}
    assert {Path(font.path) for font in fonts if font.path} == set(glyphs._font_files())
    template = pdf._PAGE.read_text()
    scripts = json.loads(f"[{template.partition('#let scripts = (')[2].partition(')')[0]}]")
    named = {"Noto Sans", "Noto Emoji", "Noto Sans CJK JP", *(f"Noto Sans {script}" for script in scripts)}
    assert families == named
    assert all(f'"{name}"' in template for name in ("Noto Sans", "Noto Emoji", "Noto Sans CJK JP"))
