"""The strip of figures: text is escaped, and a figure without an explanation has no empty line."""

from __future__ import annotations

from typing import Any

from django.template import Context, Template


def render(text: str, **values: Any) -> str:
    return Template("{% load console %}" + text).render(Context(values))


def test_a_figure_has_its_label_value_color_and_explanation() -> None:
    shown = render(
        '{% stats "stats-dense" %}{% stat label value "warn" %}of {{ total }}{% endstat %}{% endstats %}',
        label="Near <b>",
        value="3 & 4",
        total="<7>",
    )
    assert shown.strip().startswith('<dl class="stats stats-dense">')
    assert "<dt>Near &lt;b&gt;</dt>" in shown
    assert '<span class="stat-value tabular warn">3 &amp; 4</span>' in shown
    assert "<dd>of &lt;7&gt;</dd>" in shown


def test_a_figure_without_an_explanation_has_no_second_line() -> None:
    shown = render('{% stats %}{% stat "Tokens" 5 %} {% endstat %}{% endstats %}')
    assert shown.count("<dd>") == 1
