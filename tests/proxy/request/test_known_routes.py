"""What is known of routes that kvpin passes on."""

import pytest

from proxy.request.known_routes import did_you_mean


@pytest.mark.parametrize(
    ("route", "meant"),
    [
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/chats/completions", "/v1/chat/completions"),
        ("/v1/chat", "/v1/chat/completions"),
        ("/v1/message", "/v1/messages"),
        ("/v1/response", "/v1/responses"),
        ("/v1/embedding", "/v1/embeddings"),
        ("/v1/model", "/v1/models"),
    ],
)
def test_a_wrong_path_means_the_route_that_it_is_like(route, meant):
    assert did_you_mean(route) == f"; did you mean {meant}?"


@pytest.mark.parametrize("route", ["/v1/rerank", "/v1/reranking", "/v1/chat/completions", "/v1/kittens", "/"])
def test_a_route_that_is_known_or_like_none_means_itself(route):
    assert did_you_mean(route) == ""
