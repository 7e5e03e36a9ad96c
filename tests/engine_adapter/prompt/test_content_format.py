import pytest

from engine_adapter.prompt.content_format import content_format
from engine_adapter.prompt.template_input import ContentFormat

PARTS = {
    "loop over the key": "{% for m in messages %}{% for c in m['content'] %}{{ c }}{% endfor %}{% endfor %}",
    "loop over attribute": "{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}",
    "filtered": "{% for m in messages %}{% for c in m.content | list %}{{ c }}{% endfor %}{% endfor %}",
    "alias of messages": (
        "{% set rest = messages[1:] %}{% set loop_messages = rest %}"
        "{% for m in loop_messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}"
    ),
    "the name content": (
        "{% for m in messages %}{% set content = m.content %}"
        "{% for c in content %}{{ c }}{% endfor %}{% endfor %}"
    ),
    "macro by position": (
        "{% macro show(body) %}{% for c in body %}{{ c }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(m.content) }}{% endfor %}"
    ),
    "macro by keyword": (
        "{% macro show(body=1) %}{% for c in body %}{{ c }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(body=m['content']) }}{% endfor %}"
    ),
    "generation tag": (
        "{% for m in messages %}{% generation %}{% for c in m.content %}{{ c }}{% endfor %}"
        "{% endgeneration %}{% endfor %}"
    ),
    "loop controls": (
        "{% for m in messages %}{% for c in m.content %}{% if c %}{% break %}{% endif %}{% endfor %}"
        "{% endfor %}"
    ),
}
STRING = {
    "plain": "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}",
    "other loops": "{% for t in tools %}{{ t }}{% endfor %}{% for m in messages %}{{ m.text }}{% endfor %}",
    "macro of other content": (
        "{% macro tool(content) %}{% for c in content %}{{ c }}{% endfor %}{% endmacro %}"
        "{{ tool(tools) }}{% for m in messages %}{{ m.content }}{% endfor %}"
    ),
    "slice of content": "{% for m in messages %}{{ m.content[1:] }}{{ m[0] }}{% endfor %}",
    "broken": "{% for m in messages %}",
    "self-assignment": "{% set messages = messages %}{% for m in messages %}{{ m.content }}{% endfor %}",
}


@pytest.mark.parametrize("name", PARTS)
def test_templates_that_loop_over_content_take_parts(name):
    assert content_format(PARTS[name]) is ContentFormat.PARTS


@pytest.mark.parametrize("name", STRING)
def test_other_templates_take_text(name):
    assert content_format(STRING[name]) is ContentFormat.STRING
