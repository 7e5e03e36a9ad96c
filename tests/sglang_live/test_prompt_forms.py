"""Each form of request on a real SGLang, whole and as a stream: what is predicted is what it reports.

The model's template writes all it is given, once as texts and once as parts.
"""

from __future__ import annotations

import shutil

import httpx
import pytest

from scripts.make_checkpoint import checkpoint_path
from tests.live.prompt_forms import REQUESTS, WITNESS, WITNESS_OF_PARTS
from tests.live.server_world import MODEL, WAIT_S
from tests.sglang_live.sglang_world import SglangOptions, sglang_world

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

REFUSED = {
    "arguments that are no object",
    "arguments that are broken",
    "no arguments",
    "chat_template_kwargs of the renderer",
}
PAGE = 16


@pytest.mark.parametrize("template", [WITNESS, WITNESS_OF_PARTS], ids=["texts", "parts"])
def test_predicted_is_reported(template, tmp_path, tell):
    model = tmp_path / "witness"
    shutil.copytree(checkpoint_path("model"), model)
    (model / "chat_template.jinja").write_text(template)
    refused, wrong = set(), []
    with sglang_world(tmp_path, SglangOptions(page=PAGE, tokens=32768, model=model)) as world:
        for name, (path, fields) in REQUESTS.items():
            body = {"model": MODEL, "max_tokens": 2, "temperature": 0, "cache_salt": name, **fields}
            url = f"{world.kvpin.base_url}/{path}"
            first = httpx.post(url, json=body, timeout=WAIT_S, trust_env=False)
            second = httpx.post(url, json=body | {"stream": True}, timeout=WAIT_S, trust_env=False)
            if first.is_error:
                refused.add(name)
                continue
            tokens = first.json()["usage"]["prompt_tokens"]
            predicted = int(second.headers["x-kvpin-predicted-tokens"])
            record = world.record(second.headers["x-request-id"])
            assert record["reported_tokens"] == (tokens - 1) // PAGE * PAGE > 0, name
            if (predicted, record["n_tokens"]) != (record["reported_tokens"], tokens):
                wrong.append((name, predicted, record))
        tell(f"{len(REQUESTS) - len(refused) - len(wrong)} of {len(REQUESTS)} exact; refused: {refused}")
        assert world.engine()["trust"] == "precise"
        (pool,) = world.kvpin.admin("GET", "stats").json()["pools"]
        assert "tokenised here" in pool["tokenisation"]["detail"]
    assert wrong == []
    assert refused == REFUSED
