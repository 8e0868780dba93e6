"""The number grammar of the console's scripts: the cases that the server's numbers pass too."""

from __future__ import annotations

from pathlib import Path

import pytest

import frontend
from tests.support.frontend import number_cases

SCRIPT = Path(frontend.__file__).parent / "static" / "frontend" / "numbers.js"


@pytest.mark.parametrize(("language", "place"), [("en", 0), ("de", 1)])
def test_scripts_format_numbers_as_the_server_does(browser, language, place):
    page = browser.new_page()
    page.set_content(f'<!doctype html><html lang="{language}"><body></body></html>')
    page.evaluate("lang => { document.documentElement.lang = lang }", language)
    page.add_script_tag(path=SCRIPT)
    calls = [[name, list(arguments)] for name, arguments, *_texts in number_cases.SCRIPT_CASES]
    shown = page.evaluate("calls => calls.map(([name, given]) => numbers[name](...given))", calls)
    page.close()
    wanted = [texts[place] for _name, _arguments, *texts in number_cases.SCRIPT_CASES]
    assert [(call, text) for call, text in zip(calls, shown, strict=True)] == list(zip(calls, wanted, strict=True))
