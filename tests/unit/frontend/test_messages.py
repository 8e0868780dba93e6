"""The translations of the console: every text has one, with the same placeholders and tags."""

from __future__ import annotations

import gettext
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from django.utils import translation

from billing.rates.price_book import nano_per_million
from billing.rates.price_files import read_csv
from frontend.core.backend_messages import translate_lazily, translate_message
from frontend.operator.fleet.views import FleetMachineCost
from frontend.operator.prices.forms import CsvImportForm, ModelPricesForm
from frontend.tenant.routing import positions
from tenants.keys import ip_allowlist
from tenants.routing_policies import policy
from tools import backend_texts, messages

LOCALES = sorted((messages.FRONTEND / "locale").glob("*/LC_MESSAGES/django.po"))


def test_there_is_german():
    assert [path.parents[1].name for path in LOCALES] == ["de"]


@pytest.mark.parametrize("path", LOCALES, ids=lambda path: path.parents[1].name)
def test_every_text_of_the_console_is_translated(path):
    catalog = messages.read(path)
    assert len(catalog) > 900
    assert messages.problems(messages.all_texts(), catalog) == []


@pytest.mark.parametrize("path", LOCALES, ids=lambda path: path.parents[1].name)
def test_the_built_translations_are_those_of_the_catalog(path):
    language, catalog = path.parents[1].name, messages.read(path)
    assert path.with_suffix(".mo").read_bytes() == messages.compile_catalog(language, catalog), "run `make setup`"
    script = messages.SCRIPTS / f"texts.{language}.js"
    assert script.read_text(encoding="utf-8") == messages.script_file(language, catalog), "run `make setup`"


def test_the_texts_of_other_packages_are_up_to_date():
    assert messages.BACKEND_TEXTS.read_text(encoding="utf-8") == messages.backend_file(), "run `make setup`"


TEMPLATES = sorted(messages.FRONTEND.rglob("*.html"))
MODULES = sorted(messages.FRONTEND.rglob("*.py"))


def test_every_visible_text_of_a_template_is_marked():
    found = {str(path): messages.unmarked_in_template(path.read_text(encoding="utf-8")) for path in TEMPLATES}
    assert len(found) > 100
    assert {name: texts for name, texts in found.items() if texts} == {}


def test_every_text_of_a_form_or_message_is_marked():
    found = {str(path): messages.unmarked_in_module(path.read_text(encoding="utf-8")) for path in MODULES}
    assert {name: texts for name, texts in found.items() if texts} == {}


def test_every_text_of_a_script_is_marked():
    found = {path.name: messages.unmarked_in_script(path.read_text()) for path in messages.scripts()}
    assert len(found) > 5
    assert {name: texts for name, texts in found.items() if texts} == {}


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ('badge.textContent = "Copied"; $(".a", _("Saved"))', ["Copied"]),
        ("title = `${n} of them written`; // Not a text", ["${n} of them written"]),
        ('if (event.key === "Enter") write("# A comment in code", "is-selected");', []),
        ("box.innerHTML = '<input placeholder=\"Search here\">'", ['<input placeholder="Search here">']),
        ('_("The %(n)s rows", { n }) + "no price"', ["no price"]),
    ],
)
def test_unmarked_texts_of_scripts_are_found(source, texts):
    assert messages.unmarked_in_script(source) == texts


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ("<p>Save</p>", ["Save"]),
        ('<p>{% translate "Save" %} · {{ name }} <code>model</code></p>', []),
        ("<p>{{ n }} rows{% if more %} of {{ all }}{% endif %}</p>", ["rows", "of"]),
        ('<a {% opens "dialog" "keys-new" %} aria-label="New {{ name }}">{% icon "plus" %}</a>', ["New"]),
        ("<td data-label=\"{% translate 'Name' %}\">{% blocktranslate %}{{ n }} rows{% endblocktranslate %}</td>", []),
        ('{% table _("Keys") "All keys" _("#Cost") %}', ["All keys"]),
        ('{% stat "Spend" panel.spend|money %}{% endstat %}', ["Spend"]),
    ],
)
def test_unmarked_texts_of_templates_are_found(source, texts):
    assert messages.unmarked_in_template(source) == texts


def test_unmarked_texts_of_modules_are_found():
    source = """form(label="Name", help_text=_lazy("A name"), name="Key one", submit="save")
view(message=lambda made: f"{made.name} was saved.", effect=_("Saves %(name)s") % {"name": "Key"})"""
    assert messages.unmarked_in_module(source) == ["Name", " was saved."]
    source = """RANGES = {"1h": ("1 hour", 60), "a": (_lazy("2 hours"), "two words here")}
rows.append(Row(f"Cost of {n} requests", "Passed all checks", _("Saved it")))"""
    assert sorted(messages.unmarked_in_module(source)) == ["1 hour", "Cost of ", "Passed all checks"]


def test_texts_of_other_packages_are_found():
    source = """ADVICE = {True: "Wait 5%.", False: f"Stop {name!r}."}
def check(number):
    more = f", and {number} more" if number else ""
    message = "Enter it."
    raise FieldRefused("field", "invalid", message)
    raise Conflict(f"{row.name} from {row.name}{more}{text}.") from exc
    raise ActionRefused(f"{exc}.")
    yield HealthIssue(kind, title=_title(row), todo=ADVICE[True], subject="Not shown")
def _title(row):
    return f"Lost {row['n']:,}"[:20]"""
    assert set(backend_texts.texts_of(source)) == {
        "Enter it.",
        "%(row_name)s from %(row_name_2)s, and %(number)s more%(text)s.",
        "%(row_name)s from %(row_name_2)s%(text)s.",
        "Lost %(row_n)s",
        "Wait 5%%.",
        "Stop %(name)s.",
    }
    errors = backend_texts.texts_of('raise ValueError(f"{n} is wrong")', arguments={"ValueError": (0,)})
    assert errors == ["%(n)s is wrong"]
    assert backend_texts.texts_of('def describe():\n    return "running"', "describe") == ["running"]
    labels = "class Component:\n    A = *('a', 'Input'), 'Input tokens', 'tokens'\n    B = 'b', 'Output', 'All output'"
    assert backend_texts.labels_of(labels) == ["Input", "Input tokens", "Output", "All output"]


def raised(parse: Callable[[], object]) -> str:
    with pytest.raises(ValueError, match=r"[a-z]") as error:
        parse()
    return str(error.value)


@pytest.mark.parametrize(
    "parse",
    [
        lambda: nano_per_million("x"),
        lambda: nano_per_million("0.0000000001"),
        lambda: read_csv(["model,tier", "a,b"]),
        lambda: policy.parse({"aliases": {}, "nothing": 1}),
        lambda: policy.parse({"targets": "x"}),
        lambda: ip_allowlist.normalize_networks(["10.0.0.0/99"]),
    ],
)
def test_errors_of_parsers_are_translated(parse):
    message = raised(parse).partition(" - at `")[0]
    with translation.override("de"):
        assert translate_message(message) != message


def test_errors_of_parsers_are_translated_in_forms():
    with translation.override("de"):
        found = positions.read('{"aliases": {}, "nothing": 1}')
        assert isinstance(found, positions.PolicyError)
        assert found.message.startswith(("Das Objekt enthält das unbekannte Feld", "Im Objekt fehlt das Feld"))
        broken = positions.read('{"aliases": {},}')
        assert isinstance(broken, positions.PolicyError)
        assert "doppelten Anführungszeichen" in broken.message
        prices = ModelPricesForm({"model": "m", "tier": "standard", "uncached": "x"})
        assert prices.errors["uncached"] == ["'x' ist keine Zahl."]
        upload = CsvImportForm({"text": "model,tier\na,b"})
        assert any("Spalten" in error for error in upload.non_field_errors())
        assert FleetMachineCost({"amount": "x"}).errors["amount"][0].endswith("'x' ist keine Zahl.")


def test_texts_of_other_packages_are_translated_with_their_values():
    german = [
        ("Enter a reason.", "Geben Sie einen Grund ein."),
        ("1,234 mails have not been sent for an hour", "1.234 E-Mails wurden seit einer Stunde nicht gesendet"),
        ("No reconciliation for 3\xa0days", "3\xa0Tage lang kein Abgleich"),
        ("Acme: budget “Prod: all” is 95% used", "Acme: Das Budget „Prod: all“ ist zu 95 % verbraucht"),
        (
            "web: restarting, 4 deaths, last: SIGKILL, next start in 3 s",
            "web: startet neu, 4 Abstürze, zuletzt: SIGKILL, nächster Start in 3 s",
        ),
        ("invoice.paid: invoice fully paid", "invoice.paid: Rechnung vollständig bezahlt"),
        ("line 3: 'x' is not a number", "Zeile 3: 'x' ist keine Zahl"),
        (
            "Allowed IPs: '10.0.0.0/99' does not appear to be an IPv4 or IPv6 network.",
            "Erlaubte IPs: '10.0.0.0/99' ist kein IPv4- oder IPv6-Netz.",
        ),
        ("Object contains unknown field `when`", "Das Objekt enthält das unbekannte Feld `when`"),
        ("expected 0 to 99, not 1,000", "Erwartet wird 0 bis 99, nicht 1.000"),
        (
            "m: status 429: The rate limit is reached. Try again.",
            "m: Status 429: The rate limit is reached. Try again.",
        ),
        ("An unknown text: of a plugin", "An unknown text: of a plugin"),
        ("Enter a reason." + " " * 1000, "Enter a reason." + " " * 1000),
    ]
    label = translate_lazily("invoice voided")
    with translation.override("de"):
        assert [(text, translate_message(text)) for text, _ in german] == german
        assert str(label) == "Rechnung storniert"
    assert [translate_message(text) for text, _ in german] == [text for text, _ in german]
    assert str(label) == "invoice voided"


def test_texts_of_templates_and_modules_are_found(tmp_path: Path) -> None:
    template = """<p>{% translate "One" %}</p>{% blocktranslate with n=a.b %}Two {{ n }} 5%{% endblocktranslate %}
        {% blocktranslate count n=n %}{{ n }} row{% plural %}{{ n }} rows{% endblocktranslate %}
        {% table _("Three") %}"""
    (tmp_path / "page.html").write_text(template)
    (tmp_path / "page.py").write_text('LABELS = {"a": _lazy("Four")}\nsay(_("One"), other("No"), _(name))\n')
    assert messages.extract(tmp_path) == [
        *[("One", ""), ("Two %(n)s 5%%", ""), ("%(n)s row", "%(n)s rows"), ("Three", ""), ("Four", "")]
    ]


def test_a_catalog_is_written_read_and_compiled(tmp_path: Path) -> None:
    catalog = {('A "b"\n', ""): ("Ä",), ("%(n)s row", "%(n)s rows"): ("%(n)s Zeile", "%(n)s Zeilen"), ("C", ""): ("",)}
    path = tmp_path / "django.po"
    messages.write(path, "de", catalog)
    assert messages.read(path) == catalog
    found = gettext.GNUTranslations(io.BytesIO(messages.compile_catalog("de", catalog)))
    assert (found.gettext('A "b"\n'), found.gettext("C")) == ("Ä", "C")
    assert [found.ngettext("%(n)s row", "%(n)s rows", n) for n in (0, 1, 2)] == [
        *("%(n)s Zeilen", "%(n)s Zeile", "%(n)s Zeilen")
    ]


@pytest.mark.parametrize(
    ("text", "translated", "problem"),
    [
        ("<b>%(n)s</b> left", "<b>%(m)s</b> übrig", "other placeholders or tags"),
        ("<b>%(n)s</b> left", "%(n)s übrig", "other placeholders or tags"),
        ("Left", "", "not translated"),
    ],
)
def test_problems_are_reported(text, translated, problem):
    assert problem in messages.problems([(text, "")], {(text, ""): (translated,)})[0]
    assert messages.problems([], {("Old", ""): ("Alt",)}) == ["no longer used: 'Old'"]
    assert messages.problems([("New", "")], {}) == ["not extracted: 'New'"]
