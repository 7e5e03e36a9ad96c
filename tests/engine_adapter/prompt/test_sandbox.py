"""The sandbox gives templates what jinja2's own gives them."""

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine_adapter.prompt.sandbox import Sandbox


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


@pytest.mark.parametrize("expression", [*CALLS, *READS])
def test_every_access_has_jinja2s_result(expression):
    assert result(Sandbox(), expression) == result(ImmutableSandboxedEnvironment(), expression)


def test_private_names_stay_closed():
    assert result(Sandbox(), "d.__class__.x")[0].__name__ == "SecurityError"
