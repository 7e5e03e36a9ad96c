"""The sandbox gives templates what jinja2's own gives them, but nothing that would fill time or memory."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine_adapter.prompt import sandbox
from engine_adapter.prompt.sandbox import Sandbox
from engine_adapter.prompt.templates import render_template


class Text(str):
    __slots__ = ()


class Fields(dict):
    pass


VALUES = {
    "d": {"role": "user", "items": "mine", "_own": 1, "none": None},
    "s": " Text\n",
    "l": [1, 2],
    "t": Text("sub"),
    "f": Fields(role="x"),
    "n": None,
}
NAMES = (
    *("role", "missing", "items", "keys", "update", "_own", "none", "__class__", "strip", "format", "append"),
)
CALLS = (
    "d.role", "d.missing.deeper", "d.items()", "d.update({})", "d.get('role')", "s.strip()", "s.format(1)",
    "'{0.__class__}'.format(s)", "'{x}'.format_map(d)", "s.split('e')[0]", "s.__class__.__mro__",
    "l.append(3)",
    "t.upper()", "f.role", "n.x", "d['role']", "s.encode()",
)  # fmt: skip
READS = [f"{value}.{name} is defined" for value in VALUES for name in NAMES]


def result(environment, expression):
    try:
        return environment.from_string("{{ " + expression + " }}").render(VALUES)
    except Exception as error:  # noqa: BLE001 - the error is the result
        return type(error), str(error)


def test_every_access_has_jinja2s_result():
    ours, theirs = Sandbox(), ImmutableSandboxedEnvironment()
    for expression in (*CALLS, *READS):
        assert result(ours, expression) == result(theirs, expression), expression


# --- single calls that would fill the memory, and those of usual size -----------------------------------

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


DOUBLED = """
{%- macro twice(a) -%}{{ a }}{{ a }}{%- endmacro -%}
{%- macro around(n) -%}{{ caller() }}{{ caller() }}{%- endmacro -%}
{%- macro deep(a, n) -%}{% if n %}{{ deep(a + a, n - 1) }}{% endif %}{%- endmacro -%}
{%- set ns = namespace(a=START) -%}
{%- for i in range(60) %}{% set a = ns.a %}STEP{% endfor -%}
"""


def check_doubled(start, step):
    with pytest.raises(SecurityError):
        render_template(DOUBLED.replace("START", start).replace("STEP", step), [])


@pytest.mark.parametrize(
    "step",
    [
        "a + a",
        "a ~ a",
        "a ~ '' ~ '' ~ '' ~ '' ~ a",
        "twice(a)",
        "'%s%s' % (a, a)",
        "'%(a)s%(a)s' % {'a': a}",
        "'%s%s' | format(a, a)",
        "'{0}{0}'.format(a)",
        "[a, a] | join",
        "''.join([a, a])",
        "a.replace('x', 'xx')",
        "('\"' ~ a) | tojson",
        "(a + a) | list | join",
    ],
)
def test_a_text_is_not_doubled_without_end(step):
    check_doubled("'x'", "{% set ns.a = " + step + " %}")


@pytest.mark.parametrize(
    ("start", "step"),
    [
        ("[1]", "{% set ns.a = a + a %}"),
        ("(1,)", "{% set ns.a = a + a %}"),
        ("[1]", "{% set ns.a = [a, a] | sum(start=[]) %}"),
        ("'x'", "{% set b %}{{ a }}{{ a }}{% endset %}{% set ns.a = b %}"),
        ("'x'", "{% set b %}{% call around(1) %}{{ a }}{% endcall %}{% endset %}{% set ns.a = b %}"),
        ("'x'", "{{ deep(a, 60) }}"),
        ("'x' * 999999", "{% set b = a ~ i %}" * 10),
    ],
)
def test_nor_is_a_list_or_what_blocks_and_macros_make(start, step):
    check_doubled(start, step)


@pytest.mark.parametrize(
    "made", ["map('center', 60000)", "map('replace', '', 'x' * 9999)", "map('indent', 60000, true)"]
)
def test_many_texts_below_64_kib_do_not_fill_the_memory(made):
    with pytest.raises(SecurityError, match="so many texts"):
        render_template("{{ range(100000) | map('string') | " + made + " | list | length }}", [])


@pytest.mark.parametrize("text", ["t + i", "'%s%s' % (t, i)"])
def test_nor_do_sums_in_loops(text, monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_BYTES", 64 << 20)
    bomb = "{% set t = 'x' * 60000 %}{% set ns = namespace(kept=[]) %}"
    bomb += "{% for _ in range(1000) %}{% for i in 'abcdefghij' * 50 %}"
    bomb += "{% set ns.kept = [ns.kept, " + text + "] %}{% endfor %}{% endfor %}"
    with pytest.raises(TemplateError, match=r"of memory|so many texts"):
        render_template(bomb, [])


def test_where_the_system_does_not_tell_its_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox, "MAX_BYTES", 0)
    monkeypatch.setattr(sandbox, "_STATM", tmp_path / "none")
    long = "{% for _ in range(1000) %}{% for i in range(200) %}{% endfor %}{% endfor %}done"
    assert render_template(long, []) == "done"


def test_in_the_main_thread_where_others_wait_it_has_less_time(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_LOOP_S", 0.05)
    long = "{% for _ in range(1000) %}{% for i in range(2000) %}{% endfor %}{% endfor %}done"
    with pytest.raises(TemplateError, match=r"more than 0\.05 s of CPU time"):
        render_template(long, [])
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(render_template, long, []).result() == "done"


def test_a_whole_of_few_long_pieces_is_not_made():
    with pytest.raises(TemplateError, match="over 256 Mi characters"):
        render_template("{% set a = 'x' * 999999 ~ 'x' %}" + "{{ a }}" * 280, [])


def test_each_rendering_may_make_long_texts():
    template = "{% set a = 'x' * 999999 %}" + "{% set b = a + a %}" * 100 + "{{ b + '' }}"
    assert [len(render_template(template, [])) for _ in range(3)] == [2 * 999_999] * 3


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("(1.5 + 2, [1] + [2])", "(3.5, [1, 2])"),
        ("messages[0].n + messages[0].n", "4"),
        ("'a' + 'b' + messages[0].t + 'c' + messages[0].t + messages[0].t", "abtctt"),
        ("messages[0].t + messages[0].t ~ messages[0].n ~ 1 ~ none ~ true", "tt21NoneTrue"),
        ("'a'.center(3)", " a "),
        ("'a-b-c'.replace('-', '+', 1)", "a+b-c"),
        ("', '.join(['a', 'b'])", "a, b"),
        ("'abc'.translate({97: 'x', 98: None})", "xc"),
        ("'{:>3}|{a}'.format(1, a=2)", "  1|2"),
        ("'{a}'.format_map({'a': 1})", "1"),
        ("'%3d%%|%s' % (1, 'x')", "  1%|x"),
        ("('-' * 3, 3 * '-', 2 ** 10, 2 ** -1, [1] * 2)", "('---', '---', 1024, 0.5, [1, 1])"),
        ("'%s' | format('x')", "x"),
        ("'a\\nb' | indent('> ', first=true)", "> a\n> b"),
        ("[{'a': 1}] | join(', ', attribute='a')", "1"),
        ("'a-b' | replace('-', '+')", "a+b"),
        ("'a b' | wordwrap(1, wrapstring='|')", "a|b"),
        ("[1, 2, 3] | batch(2, 0) | list", "[[1, 2], [3, 0]]"),
        ("[1, 2] | slice(2) | list", "[[1], [2]]"),
        ("([1, 2] | sum, [{'n': 3}] | sum(attribute='n'), [[1], [2]] | sum(start=[]))", "(3, 3, [1, 2])"),
        ("lipsum(1, html=false) | length > 0", "True"),
    ],
)
def test_others_are_made(call, text):
    assert render_template("{{ " + call + " }}", [{"n": 2, "t": "t"}]) == text
