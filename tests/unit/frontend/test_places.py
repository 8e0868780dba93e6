"""Positions of errors in a policy's text, and the formatting of policies."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from frontend.tenant.routing import positions
from frontend.tenant.routing.positions import PolicyError
from tenants.routing_policies import diffs

TEXT = """{
  "rules": [
    {"when": {"hours": {"start": "8:00",
       "end": "18:00"}}, "targets": [{"model": "a"}]},
    {"targets": [{"model": "b"},
                 {"model": "b"}]}
  ]
}"""


@pytest.mark.parametrize(
    ("text", "line", "place", "said"),
    [
        (TEXT, 3, "rules[0].when.hours.start", "Expected a time as HH:MM"),
        (TEXT.replace('"8:00"', '"08:00"'), 6, "rules[1].targets[1].model", "'b' is listed twice"),
        ('{"rules": [\n{"targets": [\n{"modl": "a"}]}]}', 3, "rules[0].targets[0]", "Object"),
        ('{"rules": [\n{},,]}', 2, "", "Expecting value"),
        ('{"name": 1,\n"ruls": []}', 1, "", "Object"),
        ("[]", 1, "", "Expected an object"),
        ("", 1, "", "Expecting value"),
        ('{"rules": [\n{"when": {"tools":\n3}, "targets": []}]}', 3, "rules[0].when.tools", "Expected"),
        ('{"rules":\n[{"targets": [{"model": "}],{:\\""},\n{"model": 5}]}]}', 3, "rules[0].targets[1].model", "Exp"),
        ("[" * 60_000, 1, "", ""),
    ],
)
def test_errors_have_line_numbers(text, line, place, said):
    found = positions.read(text)
    assert isinstance(found, PolicyError)
    assert (found.line, found.place) == (line, place)
    assert found.message.startswith(said)
    assert [one.number for one in found.lines if one.is_it] in ([line], [])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4))
@example({"a": ["{ b }", "[ 1"], "c": "} ]"})
def test_formatting_keeps_the_policy(body):
    assert json.loads(diffs.pretty(body)) == body


@given(st.text(max_size=200) | JSON.map(json.dumps))
def test_any_text_is_parsed_or_has_an_error(text):
    found = positions.read(text)
    assert not isinstance(found, PolicyError) or found.line >= 1


def test_small_parts_are_written_on_one_line():
    body = {"fallback_on": ["error"], "rules": [{"targets": [{"weight": 2, "model": "a"}], "when": {"keys": [1, 2]}}]}
    assert diffs.pretty(body).splitlines() == [
        *("{", '  "rules": [', "    {", '      "when": {', '        "keys": [1, 2]', "      },", '      "targets": ['),
        *('        {"model": "a", "weight": 2}', "      ]", "    }", "  ],", '  "fallback_on": ["error"]', "}"),
    ]
