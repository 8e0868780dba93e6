"""The translations of the console: every text has one, with the same placeholders and tags."""

from __future__ import annotations

import copy
import gettext
import io
import pickle
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
from inference_worker.contract.texts import Text
from tenants.actions import ActionRefused
from tenants.keys import ip_allowlist
from tenants.routing_policies import policy
from tools import messages

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


PACKAGE_MODULES = sorted(
    path for directory in messages.PACKAGES for path in directory.rglob("*.py") if "migrations" not in path.parts
)
# Directories whose ValueErrors forms show, and their modules that only commands use.
PARSERS = ("billing/rates/", "tenants/routing_policies/")
COMMANDS_ONLY = ("complexity_training.py", "quotes.py")


def test_every_text_of_other_packages_is_marked():
    found = {}
    for path in PACKAGE_MODULES:
        name = path.relative_to(messages.ROOT).as_posix()
        errors = ("ValueError",) if name.startswith(PARSERS) and path.name not in COMMANDS_ONLY else ()
        found[name] = messages.unmarked_in_package(path.read_text(encoding="utf-8"), errors)
    assert len(found) > 300
    assert {name: texts for name, texts in found.items() if texts} == {}


def test_unmarked_texts_of_other_packages_are_found():
    source = """def check(number):
    message = "Enter it."
    raise FieldRefused("field", "invalid", message)
    raise Conflict(f"{row.name} exists.") from exc
    raise ActionRefused(Text("Marked %(name)s.", name=name))
    raise ActionRefused(Text("Marked.") if number else "Not marked.")
    yield HealthIssue(kind, title="A title", todo=Text("Do it."), subject="Not shown")
def compute(message="Not shown"):
    raise ValueError("Wrong.")"""
    unmarked = {"Enter it.", " exists.", "Not marked.", "A title"}
    assert set(messages.unmarked_in_package(source)) == unmarked
    assert set(messages.unmarked_in_package(source, ("ValueError",))) == unmarked | {"Wrong."}


def raised(parse: Callable[[], object]) -> ValueError:
    with pytest.raises(ValueError, match=r"[a-z]") as error:
        parse()
    return error.value


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
    error = raised(parse)
    with translation.override("de"):
        assert translate_message(error) != str(error)
    assert translate_message(error) == str(error)


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
    late = "%(number)s email has not been sent for an hour"
    rows = [
        (Text("Enter a reason."), "Enter a reason.", "Geben Sie einen Grund ein."),
        *(
            (
                Text(late, "%(number)s emails have not been sent for an hour", number=number),
                english,
                german,
            )
            for number, english, german in (
                (1, late % {"number": 1}, "1 E-Mail wurde seit einer Stunde nicht gesendet"),
                (
                    1234,
                    "1,234 emails have not been sent for an hour",
                    "1.234 E-Mails wurden seit einer Stunde nicht gesendet",
                ),
            )
        ),
        (
            Text("No reconciliation for %(duration)s", duration=Text("%(number)s\xa0day", "…", number=1)),
            "No reconciliation for 1\xa0day",
            "1\xa0Tag lang kein Abgleich",
        ),
        (
            Text("%(name)s: %(state)s", name="m", state=Text("invoice voided")),
            "m: invoice voided",
            "m: Rechnung storniert",
        ),
        (Text("Enter a change from 0 to 10 (1,000%%)."), "Enter a change from 0 to 10 (1,000%).", None),
        ("An unknown text of a plugin: 5%", "An unknown text of a plugin: 5%", "An unknown text of a plugin: 5%"),
        ("", "", ""),
    ]
    label = translate_lazily(Text("invoice voided"))
    for text, english, german in rows:
        assert (str(text), translate_message(text)) == (english, english)
        with translation.override("de"):
            assert str(text) == english  # APIs, logs and stored rows
            assert translate_message(text) == german or german is None
    with translation.override("de"):
        assert str(label) == "Rechnung storniert"
        assert translate_message(ActionRefused(Text("Enter a reason."))) == "Geben Sie einen Grund ein."
        assert translate_message(OSError(2, "No such file")) == "[Errno 2] No such file"
    assert str(label) == "invoice voided"


def test_a_text_is_copied_with_its_values():
    text = Text("%(number)s row", "%(number)s rows", number=3, name=Text("x"))
    for other in (copy.deepcopy(text), pickle.loads(pickle.dumps(text))):  # noqa: S301
        assert (other, other.message, other.plural, other.values) == (text, text.message, text.plural, text.values)
    assert type(str(text)) is str


def test_texts_of_templates_and_modules_are_found(tmp_path: Path) -> None:
    template = """<p>{% translate "One" %}</p>{% blocktranslate with n=a.b %}Two {{ n }} 5%{% endblocktranslate %}
        {% blocktranslate count n=n %}{{ n }} row{% plural %}{{ n }} rows{% endblocktranslate %}
        {% table _("Three") %}"""
    (tmp_path / "page.html").write_text(template)
    (tmp_path / "page.py").write_text("""LABELS = {"a": _lazy("Four")}
say(_("One"), other("No"), _(name))
raise Conflict(Text("%(name)s: five", name=name), Text("%(a)s: %(b)s", a=1, b=2))
raise Conflict(Text("%(number)s key", "%(number)s keys", number=1))
""")
    assert messages.extract(tmp_path) == [
        *[("One", ""), ("Two %(n)s 5%%", ""), ("%(n)s row", "%(n)s rows"), ("Three", ""), ("Four", "")],
        *[("%(name)s: five", ""), ("%(number)s key", "%(number)s keys")],
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
