import pytest

from proxy.server.tracing.traced import engine_span_name, of_exchange, route_name
from tests.proxy.observe.test_metrics import record


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/embeddings", "/v1/embeddings"),
        ("/tokenize", "/tokenize"),
        ("/v1/responses/resp_1", "/v1/*"),
        ("/v1/whatever", "/v1/*"),
    ],
)
def test_a_route_names_no_single_thing(path, name):
    assert route_name(path) == name
    assert of_exchange("GET", path) == {"http.request.method": "GET", "url.path": path, "http.route": name}


def test_a_long_path_is_cut():
    assert len(of_exchange("GET", "/v1/" + "x" * 60_000)["url.path"]) == 256


def test_a_span_is_named_after_what_is_asked_of_the_model():
    asked = record(lora="ada")
    asked.route = "/v1/completions"
    assert engine_span_name(asked) == "text_completion ada"
    asked.route, asked.lora = "/v1/rerank", None
    assert engine_span_name(asked) == "forward m"
