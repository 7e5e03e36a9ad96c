"""The table of open routes, held against what adapters and OpenAI's client library know."""

import re
from pathlib import Path

import openai
import pytest

from engine_adapter import NATIVE_ROUTES
from proxy.errors import Forbidden
from proxy.request.calls import PROMPT_ROUTES
from proxy.request.engine_errors import PASSED_ON
from proxy.request.stored import COLLECTIONS, Kind, check_route, open_route
from proxy.request.stored.routes import why_refused

_CALL = re.compile(r"(?=self\._(?:post|get|delete|patch|put|get_api_list)\()")
_ROUTE = re.compile(r'self\._(\w+)\(\s*(?:path_template\(\s*)?f?"(/[^"?]+)')


def of_openai():
    """Methods and routes in the sources of the package; an id is X."""
    found = set()
    for file in sorted(Path(openai.__file__).parent.glob("resources/**/*.py")):
        for called in _CALL.split(file.read_text()):
            if (call := _ROUTE.match(called)) is not None:
                is_post = call[1] == "get_api_list" and 'method="post"' in called.partition("\n    def ")[0]
                method = "post" if is_post else call[1].replace("get_api_list", "get")
                found.add((method.upper(), "/v1" + re.sub(r"\{[^}]*\}", "X", call[2])))
    return sorted(found)


OPENAI = of_openai()


def test_the_package_was_read():
    assert len(OPENAI) > 100
    assert {("POST", "/v1/vector_stores/X/search"), ("GET", "/v1/files"), ("DELETE", "/v1/files/X")} <= {
        *OPENAI
    }


@pytest.mark.parametrize(("method", "route"), OPENAI)
def test_openais_routes_are_open_or_refused_for_a_reason(method, route):
    if not route.startswith("/v1/models"):  # kvpin answers these itself
        assert open_route(method, route) or why_refused(method, route)


@pytest.mark.parametrize("path", sorted(NATIVE_ROUTES))
def test_routes_of_adapters_are_open_or_refused_for_a_reason(path):
    """WebSockets are refused by themselves."""
    native = NATIVE_ROUTES[path]
    route = native.same_as or path
    if not path.startswith("WebSocket ") and route != "/v1/models":
        assert open_route(native.method, route) or why_refused(native.method, route)


def test_routes_that_kvpin_knows_by_name_are_open():
    for route in PROMPT_ROUTES | PASSED_ON | {*COLLECTIONS.values()}:
        assert (open_route("POST", route) is None) == (route == "/v1/batches")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/new"), ("GET", "/v1/chat/completions"), ("GET", "/v1/chat/completions/X"),
        ("GET", "/v1"), ("PATCH", "/v1/files/X"), ("GET", "/v1/files"), ("GET", "/slots"),
        ("POST", "/v1/files/X"),
        ("GET", "/"), ("get", "/v1/files/X"), ("GET", "/v1/files/X/Y"), ("GET", "/v1/loads"),
        ("DELETE", "/v1/vector_stores"),
        ("TRACE", "/v1/responses/X"), ("GET", "/v1/files/{}/files/{}"), ("POST", "/v1/{}"),
        ("HEAD", "/v1/files"),
        ("GET", "/v1/files?x=/v1/files/X"), ("GET", "/v1/files/X/content/Y"), ("POST", "/v1/threads/X/runs"),
    ],
)  # fmt: skip
def test_any_other_route_is_refused(method, path):
    with pytest.raises(Forbidden, match="several tenants"):
        check_route(method, path)


def test_what_an_entry_says():
    assert open_route("HEAD", "/v1/files/X/") == open_route("GET", "/v1/files/X")
    assert open_route("GET", "/v1/files/X").kind is Kind.FILE
    assert open_route("DELETE", "/v1/files/X").ends
    assert not open_route("DELETE", "/v1/vector_stores/X/files/Y").ends
    assert open_route("POST", "/v1/uploads/X/complete").makes == {"file": Kind.FILE}
    assert open_route("POST", "/v1/responses/compact").kind is None
    check_route("GET", "/v1//files/%46?x=/y")
