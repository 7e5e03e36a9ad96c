"""Single calls in a template that would fill the memory, and those of usual size."""

import pytest
from jinja2.exceptions import SecurityError

from engine_adapter.prompt.templates import environment, render_template

MUCH = "10**10"
LONG = "('a' * 99999)"


@pytest.mark.parametrize(
    "bomb",
    [
        *(f"'a'.{name}({MUCH})" for name in ("center", "ljust", "rjust", "zfill")),
        f"'\\t'.expandtabs({MUCH})",
        f"{LONG}.replace('a', {LONG})",
        f"{LONG}.join({LONG})",
        f"{LONG}.translate({{97: {LONG}}})",
        "'{:9999999999}'.format(1)",
        "'{:{}}'.format(1, 9999999999)",
        "'{a:>9999999999}'.format_map({'a': 1})",
        "'%9999999999d' % 1",
        "'%(a)-9999999999d' % {'a': 1}",
        "'%*d' % (9999999999, 1)",
        "'%.9999999999f' % 1",
        "'%9999999999d' | format(1)",
        f"'a' | center({MUCH})",
        f"'a\\nb' | indent({MUCH})",
        f"{LONG} | replace('a', {LONG})",
        f"{LONG} | join({LONG})",
        f"{LONG} | wordwrap(1, true, {LONG})",
        f"[1] | batch({MUCH}, 0) | list",
        f"[1] | slice({MUCH}) | list",
        f"[1] | tojson(indent={MUCH})",
        f"lipsum({MUCH})",
        f"'a' | attr('center')({MUCH})",
        f"['a'] | map('center', {MUCH}) | list",
    ],
)
def test_a_call_that_would_fill_the_memory_is_refused(bomb):
    with pytest.raises(SecurityError):
        render_template("{{ " + bomb + " }}", [])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("'a'.center(3)", " a "),
        ("'a-b'.replace('-', '+')", "a+b"),
        ("'a-b-c'.replace('-', '+', 1)", "a+b-c"),
        ("', '.join(['a', 'b'])", "a, b"),
        ("'abc'.translate({97: 'x', 98: None})", "xc"),
        ("'{:>3}|{a}'.format(1, a=2)", "  1|2"),
        ("'{a}'.format_map({'a': 1})", "1"),
        ("'%3d%%|%s' % (1, 'x')", "  1%|x"),
        ("7 % 4", "3"),
        ("'%s' | format('x')", "x"),
        ("'a\\nb' | indent(2)", "a\n  b"),
        ("'a\\nb' | indent('> ', first=true)", "> a\n> b"),
        ("[1, 2] | join(', ')", "1, 2"),
        ("[{'a': 1}] | join(', ', attribute='a')", "1"),
        ("'a-b' | replace('-', '+')", "a+b"),
        ("'a b' | wordwrap(1, wrapstring='|')", "a|b"),
        ("[1, 2, 3] | batch(2, 0) | list", "[[1, 2], [3, 0]]"),
        ("[1, 2] | slice(2) | list", "[[1], [2]]"),
        ("lipsum(1, html=false) | length > 0", "True"),
    ],
)
def test_others_are_made(call, text):
    assert render_template("{{ " + call + " }}", []) == text


def test_no_method_of_strings_is_missing():
    assert environment.from_string("{{ 'Ab'.lower() }}{{ 'a b'.split() }}").render() == "ab['a', 'b']"
