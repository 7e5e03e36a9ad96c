"""What is known of routes that kvpin passes on."""

import pytest

from proxy.request.known_routes import did_you_mean, of_lacking


@pytest.mark.parametrize(
    ("route", "meant"),
    [
        ("/v1/chats/completions", "/v1/chat/completions"),
        ("/v1/chat", "/v1/chat/completions"),
        ("/v1/message", "/v1/messages"),
        ("/v1/model", "/v1/models"),
    ],
)
def test_a_wrong_path_means_the_route_that_it_is_like(route, meant):
    assert did_you_mean(route) == f"; did you mean {meant}?"


@pytest.mark.parametrize("said", ["File Not Found", "Not Found", "not found."])
def test_an_engine_that_says_that_nothing_is_there_lacks_the_route(said):
    assert of_lacking("/v1/files", said) == ": no engine that was asked has the route /v1/files"
    assert of_lacking(f"/v1/{'x' * 500}", said).endswith("x" * 90)


def test_an_engine_that_says_what_is_not_there_has_the_route():
    assert of_lacking("/v1/files", "No such File object: f") == ""
