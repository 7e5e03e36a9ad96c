"""Chats with images on a real vision model: predictions are exact, and a uuid stands for one image."""

from __future__ import annotations

import base64
import random
import struct
import threading
import zlib
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain

import httpx
import pytest

from scripts.make_vision_model import main as make_vision_model
from tests.live.server_world import MODEL, WAIT_S
from tests.vllm_live.vllm_world import BLOCK, VllmOptions, vllm_world

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

LIMIT = ("--limit-mm-per-prompt", '{"image": 4}')
SYSTEM = {"role": "system", "content": "You look at pictures and tell what is in them. " * 6}
WORDS = "see the sea and say what a ship is this in fog or at night".split()  # noqa: SIM905 - as people read it


def png(seed, width=96, height=96):
    """A picture of noise."""
    dice = random.Random(seed)  # noqa: S311 - not for secrets
    rows = b"".join(b"\0" + dice.randbytes(3 * width) for _ in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    framed = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def image(content, **fields):
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": url}, **fields}


def named(uuid):
    return {"type": "image_url", "image_url": None, "uuid": uuid}


def text(content):
    return {"type": "text", "text": content}


def chat(*parts):
    return [SYSTEM, {"role": "user", "content": list(parts)}]


CAT, DOG, SHIP, WIDE = png(1), png(2), png(3), png(4, 192, 96)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("vision")
    make_vision_model(directory)
    return directory


@pytest.fixture(scope="module")
def world(tmp_path_factory, model):
    options = VllmOptions(blocks=300, model=model, flags=("--enable-scale-out", *LIMIT))
    with vllm_world(tmp_path_factory.mktemp("world"), options) as world:
        yield world


@pytest.fixture(autouse=True)
def emptied(world):
    world.admin("flush", {"all": True})


@pytest.fixture
def ask(world):
    return lambda messages, **fields: answer_of(
        world.post("chat/completions", {"messages": messages, **fields})
    )


def answer_of(response):
    """The answer's text, and the predicted and the reported reused tokens."""
    answer = response.json()
    usage = answer.get("usage", {})
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    content = answer["choices"][0]["message"]["content"] if "choices" in answer else answer["output"]
    return content, int(response.headers["x-kvpin-predicted-tokens"]), details.get("cached_tokens")


def refusal(world, messages, **fields):
    """The error in the answer to a chat."""
    body = {"model": MODEL, "max_tokens": 4, "messages": messages, **fields}
    url = f"{world.kvpin.base_url}/chat/completions"
    response = httpx.post(url, json=body, timeout=WAIT_S, trust_env=False)
    return response.status_code, response.json()["error"]


def test_what_is_shared_is_foreseen(ask):
    """Requests in order: what is special, the content, and the tokens it reuses."""
    question = text("What is there?")
    seen = text("see " * 9)
    before = 3 * BLOCK  # the system message and these words
    cases = (
        ("nothing is held", [seen, image(CAT), question], 0),
        ("the same again", [seen, image(CAT), question], 6 * BLOCK),
        ("other text behind the image", [seen, image(CAT), text("Why?")], 5 * BLOCK),
        ("another image", [seen, image(DOG), question], before),
        ("another place", [text("see " * 12), image(CAT), question], before),
        ("two images", [seen, image(CAT), question, image(WIDE)], 6 * BLOCK),
        ("the same two", [seen, image(CAT), question, image(WIDE)], 8 * BLOCK),
        ("the other way round", [seen, image(WIDE), question, image(CAT)], before),
        ("one of them another", [seen, image(CAT), question, image(png(5, 192, 96))], 6 * BLOCK),
    )
    for case, parts, expected in cases:
        assert ask(chat(*parts))[1:] == (expected, expected), case


def test_predicted_is_reported(world, tell):
    dice = random.Random(7)  # noqa: S311 - not for secrets
    pictures = [CAT, DOG, SHIP, WIDE, png(6, 96, 192)]
    talks = [[SYSTEM] for _ in range(8)]
    seen = []
    for number in range(48):
        talk = dice.choice(talks)
        words = [text(" ".join(dice.choices(WORDS, k=dice.randint(1, 40)))) for _ in range(2)]
        images = [image(dice.choice(pictures)) for _ in range(dice.choice((0, 1, 1, 2)))]
        if images and dice.random() < 0.3:
            content = base64.b64decode(images[0]["image_url"]["url"].partition(",")[2])
            images[0]["uuid"] = f"picture {pictures.index(content)}"
        parts = [part for part in chain(*zip(words, [*images, None, None], strict=False)) if part]
        talk.append({"role": "user", "content": parts})
        salt = {"cache_salt": "the client's own"} if dice.random() < 0.2 else {}
        content, predicted, reported = answer_of(world.post("chat/completions", {"messages": talk, **salt}))
        talk.append({"role": "assistant", "content": content})
        seen.append((number, bool(images), predicted, reported))
        if len(talk) > 5 or sum(str(m).count("image_url") for m in talk) > 4:
            talk[1:] = []
    assert [each for each in seen if each[2] != each[3]] == []
    with_images = [reported for _, images, _, reported in seen if images]
    tell(
        f"{len(seen)} of {len(seen)} exact, {len(with_images)} with images, {sum(r for *_, r in seen)} reused"
    )
    assert len(with_images) > 20
    assert sum(reported > 3 * BLOCK for reported in with_images) > 5


def test_what_is_behind_an_address_is_fetched_once(world, ask):
    fetched = []
    with serving(CAT, fetched) as url:
        by_address = {"type": "image_url", "image_url": {"url": url}}
        answer, predicted, _ = ask(chat(text("see"), by_address))
        assert predicted == 0
        # The engine knows the picture by its content; kvpin does not ask for it, and sees the text before it.
        again, predicted, reported = ask(chat(text("see"), by_address))
    assert answer == again == ask(chat(text("see"), image(CAT)))[0]
    assert BLOCK <= predicted < reported
    assert len(fetched) == 2


class TestUuids:
    def test_they_are_what_the_engine_tells_images_apart_by(self, ask):
        assert ask(chat(text("see"), image(CAT, uuid="cat")))[1:] == (0, 0)
        _, predicted, reported = ask(chat(text("see"), image(CAT, uuid="cat")))
        assert predicted == reported > 4 * BLOCK
        _, predicted, reported = ask(chat(text("see"), named("cat")))
        assert predicted == reported > 4 * BLOCK

    def test_other_content_under_one_is_refused(self, world, ask):
        ask(chat(text("see"), image(CAT, uuid="refused")))
        status, error = refusal(world, chat(text("see"), image(DOG, uuid="refused")))
        assert (status, error["param"]) == (400, "messages[1].content[1].uuid")

    def test_a_salts_uuid_is_its_own(self, world, ask):
        """vLLM alone shows the first salt's picture to all others."""
        ask(chat(text("see"), image(CAT, uuid="own")), cache_salt="one")
        dog, _, _ = ask(chat(text("see"), image(DOG)), cache_salt="two")
        assert ask(chat(text("see"), image(DOG, uuid="own")), cache_salt="two")[0] == dog
        assert ask(chat(text("see"), named("own")), cache_salt="two")[0] == dog
        assert ask(chat(text("see"), image(CAT)), cache_salt="two")[0] != dog
        status, error = refusal(world, chat(text("see"), named("own")), cache_salt="three")
        assert status == httpx.codes.BAD_REQUEST
        assert "Cache miss" in error["message"]


def test_without_render_the_text_before_an_image_is_followed(tmp_path, model):
    options = VllmOptions(blocks=300, model=model, flags=LIMIT)
    with vllm_world(tmp_path, options) as world:
        seen = [
            answer_of(world.post("chat/completions", {"messages": chat(text("see"), image(content))}))[1:]
            for content in (CAT, CAT, DOG)
        ]
        assert world.engine()["trust"] == "precise"
    assert seen[0] == (0, 0)
    assert [predicted for predicted, _ in seen[1:]] == [2 * BLOCK, 2 * BLOCK]
    assert seen[1][1] > seen[2][1] >= 2 * BLOCK


@contextmanager
def serving(content, fetched):
    """The address of a picture; `fetched` counts each request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            fetched.append(self.path)
            self.send_response(200)
            self.send_header("content-type", "image/png")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/cat.png"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
