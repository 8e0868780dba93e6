"""The words of a request's codes."""

from __future__ import annotations

from django.utils import translation

from frontend.core.code_labels import CODE_LABELS, code_text
from millrace.gateway.answer_cache.guards import GUARDS
from millrace.gateway.core.errors import CODES


def test_every_error_code_and_guard_has_words_in_each_language():
    missing = {*CODES, *GUARDS} - set(CODE_LABELS)
    assert missing == set()
    with translation.override("de"):
        assert code_text("model_not_found") == "Modell nicht gefunden"
        assert code_text("code_of_a_later_release") == "code of a later release"


def test_english_words_are_those_of_the_code():
    assert {code: code_text(code) for code in CODE_LABELS} == {code: code.replace("_", " ") for code in CODE_LABELS}
