"""Slots under load: no answer is computed on KV that is not its own, and nobody waits for who has left."""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import socket
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import asdict, replace

import httpx
import pytest

from scripts.make_gguf import gguf_path
from tests.live import llama_hunt
from tests.live.answers import cached, text_of
from tests.live.llama_hunt import TIE, LoneServer, Quarry, quarries, said_at_once, said_in
from tests.live.llama_world import MODEL, llama_world
from tests.llama import running_llama_server

pytestmark = pytest.mark.live

# A longer hunt by hand: HUNT_REQUESTS=2000 pytest tests/live/test_llama_slots.py -k corrupt
# On a model with windows or states: HUNT_MODEL=swa, linear or conv. Its slots cannot all be saved.
REQUESTS = int(os.environ.get("HUNT_REQUESTS", "200"))
STREAMS = 200  # at once
SEED = int(os.environ.get("HUNT_SEED", "3"))
KIND = os.environ.get("HUNT_MODEL", "tiny")
OPERATORS = 4  # at once, too
DEFERRED = "requested slot is unavailable, defer task"
VERBS = ("flush", "offload", "offload", "restore", "restore", "pin", "warm")
if KIND != "tiny":
    VERBS = ("flush", "warm")
TIMEOUT_S = 120.0


class Hunt:
    """One kvpin, asked a lot at once by clients of which many leave, while its caches are operated on."""

    def __init__(self, dice: random.Random, client: httpx.AsyncClient, lone: LoneServer) -> None:
        self.dice = dice
        self.client = client
        self.lone = lone
        self.counts: Counter[str] = Counter()
        self.wrong: list[dict] = []

    async def round(self, count: int) -> None:
        hunted = await quarries(self.dice, MODEL, self.lone, count)
        self.dice.shuffle(hunted)
        async with asyncio.TaskGroup() as group:
            operating = [group.create_task(self.operate(hunted)) for _ in range(OPERATORS)]
            await asyncio.wait([group.create_task(self.ask(quarry)) for quarry in hunted])
            for task in operating:
                task.cancel()

    async def ask(self, quarry: Quarry) -> None:
        """Half of the clients stay; of the others each leaves early or in mid-answer, and half come again."""
        if self.dice.random() < 0.5:
            await self._leave(quarry)
            if self.dice.random() < 0.5:
                self.counts["left for good"] += 1
                return
        said = await self._hear(quarry)
        self.counts["complete"] += 1
        if said == quarry.expected:
            return
        strain = await self.lone.strain(quarry, said)
        if strain <= TIE:
            self.counts["near ties"] += 1
        else:
            self.wrong.append({"strain": strain, "asked": asdict(quarry), "said": said.texts})

    async def operate(self, targets: list[Quarry]) -> None:
        """One operation after the other, until cancelled."""
        while True:
            verb = self.dice.choice(VERBS)
            target = {"all": True} if self.dice.random() < 0.1 else self.dice.choice(targets).target
            if verb in ("pin", "warm"):
                target = self.dice.choice(targets).target
            if verb == "pin":
                target["ttl_s"] = 1
            answer = await self.client.post(f"/admin/v1/{verb}", json=target)
            operation = answer.json()
            if answer.status_code == 503:  # a busy server does not tokenise in time
                self.counts[f"{verb} refused"] += 1
                continue
            assert "state" in operation, operation
            self.counts[f"{verb} {operation['state']}"] += 1
            is_gone = verb == "pin" and "warm it first" in json.dumps(operation)
            assert operation["state"] != "failed" or is_gone, json.dumps(operation)

    async def _hear(self, quarry: Quarry):
        async with self._open(quarry) as answer:
            if not quarry.streams:
                return said_at_once(json.loads(await answer.aread()))
            lines = [line async for line in answer.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]", lines[-1]
        return said_in([json.loads(line.removeprefix("data: ")) for line in lines[:-1]])

    async def _leave(self, quarry: Quarry) -> None:
        if quarry.streams and self.dice.random() < 0.5:
            async with self._open(quarry) as answer:
                left = self.dice.randint(1, 12)
                async for _ in answer.aiter_lines():
                    left -= 1
                    if not left:
                        self.counts["left in mid-answer"] += 1
                        return
            self.counts["too late to leave"] += 1
            return
        hearing = asyncio.create_task(self._hear(quarry))
        # Some leave from the queue, some in prefill, some are too late.
        await asyncio.wait([hearing], timeout=self.dice.choice((0.001, 0.05, 0.2, 1.0)))
        self.counts["too late to leave" if hearing.done() else "left early"] += 1
        hearing.cancel()
        await asyncio.wait([hearing])

    @asynccontextmanager
    async def _open(self, quarry: Quarry):
        async with self.client.stream("POST", f"/v1/{quarry.path}", json=quarry.body) as answer:
            assert answer.status_code == 200, await answer.aread()
            yield answer


@pytest.mark.timeout(max(300, REQUESTS))
async def test_no_answer_is_ever_corrupt(tmp_path):
    options = f"host_cache_bytes=8MiB,disk_cache_dir={tmp_path / 'disk'},disk_cache_bytes=8MiB"
    model, flags = gguf_path(KIND), llama_hunt.FLAGS
    with (
        running_llama_server(tmp_path / "lone.log", model, *flags, slots=1) as lone_server,
        # At this level the server logs each task that it defers because its slot is busy.
        llama_world(tmp_path, *flags, "-lv", "5", model=model, engine_options=options) as world,
    ):
        async with open_client(lone_server.url) as lone_client, open_client(world.kvpin.url) as client:
            dice = random.Random(SEED)  # noqa: S311 - nothing to guess
            hunt = Hunt(dice, client, LoneServer(lone_client))
            for _ in range(0, REQUESTS, STREAMS):
                await hunt.round(min(STREAMS, REQUESTS))
        world.until_idle()
        engine = world.engine()
        found = {"wrong": hunt.wrong, "counts": hunt.counts, "audit": engine["audit"], "kv": engine["kv"]}
        (tmp_path / "found.json").write_text(json.dumps(found, indent=1))
        assert not hunt.wrong
        assert hunt.counts["near ties"] <= hunt.counts["complete"] / 10
        if KIND == "tiny":
            assert engine["kv"]["counts"]["restores"] > 10
            assert engine["findings"] == []
        assert engine["kv"]["violations"] == 0
        assert engine["kv"]["most_in_flight"] == [1] * 4
        # The server's own word, and that it would say so.
        log = world.servers[0].log
        assert DEFERRED not in log.read_text(errors="replace")
        await both_on_slot_0(world.servers[0].url)
        assert DEFERRED in log.read_text(errors="replace")


async def test_the_hunt_knows_wrong_answers(tmp_path):
    """What is right for one prompt is hardly ever right for another that differs in one word far back."""
    dice = random.Random(SEED)  # noqa: S311 - nothing to guess
    with running_llama_server(tmp_path / "lone.log", None, *llama_hunt.FLAGS, slots=1) as server:
        async with open_client(server.url) as client:
            lone = LoneServer(client)
            long = [q for q in await quarries(dice, MODEL, lone, 30) if q.body["max_tokens"] >= 16]
            right = [await lone.strain(quarry, quarry.expected) for quarry in long]
            wrong = [await lone.strain(with_another_word(quarry), quarry.expected) for quarry in long]
    assert len(long) > 10
    assert max(right) == 0
    assert sum(strain > TIE for strain in wrong) >= len(long) * 0.8


def with_another_word(quarry):
    prompt = quarry.body.get("prompt") or quarry.body["messages"][0]["content"]
    words = prompt.split(" ")
    words[4] = "map"
    changed = " ".join(words)
    if "prompt" in quarry.body:
        return replace(quarry, body={**quarry.body, "prompt": changed})
    messages = [{"role": "system", "content": changed}, *quarry.body["messages"][1:]]
    return replace(quarry, body={**quarry.body, "messages": messages})


async def both_on_slot_0(url):
    """Two requests at once on one slot, as kvpin must never send them."""
    body = {"prompt": "North", "max_tokens": 64, "id_slot": 0, "ignore_eos": True}
    async with open_client(url) as client:
        for answer in await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(2))):
            answer.raise_for_status()


def open_client(url):
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False)


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_several_choices_harm_nothing_that_is_restored_after_them(tmp_path, path):
    """Choices that end with their first token leave the server a copy of KV to be made in its next step."""
    documents = [f"The log of the {name}: " + "all was well on board. " * 30 for name in ("Ann", "Bea")]
    several = {"messages": [{"role": "user", "content": "tide " * 300}]}
    if path == "completions":
        several = {"prompt": "tide " * 300}
    with llama_world(tmp_path, *llama_hunt.FLAGS, slots=2) as world:
        right = [text_of(world.chat(document, cache_prompt=False)) for document in documents]
        for document in documents:
            world.chat(document)
            world.admin("offload", prefix(document))
        world.post(path, {**several, "max_tokens": 1, "n": 2}).raise_for_status()
        world.until_idle()
        # Both are in slots before the server takes another step.
        before = world.kv()["counts"]["restores"]
        for document in documents:
            world.admin("restore", prefix(document))
        assert world.kv()["counts"]["restores"] == before + 2
        answers = [world.chat(document) for document in documents]
        assert [cached(answer) > 100 for answer in answers] == [True, True]
        assert [text_of(answer) for answer in answers] == right


def prefix(text):
    return {"model": MODEL, "messages": [{"role": "user", "content": text}]}


SHORT = "Where is the ship? " * 30
LONG = "ship night " * 3000  # 12001 tokens, which take seconds
# A step of the server computes 256 tokens at most; slots of lower ids come first.
SMALL_STEPS = ("-b", "256")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_in_prefill_blocks_nobody(tmp_path, stream):
    with llama_world(tmp_path, *SMALL_STEPS, slots=2, ctx=16384) as world:
        world.chat(SHORT)  # on slot 0
        with begin(world, LONG, stream=stream) as client:
            (busy,) = world.until(lambda: requests_in(world.slots()), "a prefill")
            # Another client is answered meanwhile, and a third one after the first has left.
            assert cached(world.chat(SHORT + "And its boats?")) > 100
            assert not has_answer(client)
        assert cached(world.chat(SHORT + "And the crew?")) > 100
        left = world.until_idle()[busy["id"]]
        held = world.server_slots()[busy["id"]]
        assert 0 < left["tokens"] == held["n_prompt_tokens"] < 12000
        # What was computed for the one who left is of use to the next.
        part = {"prompt": "ship night " * (left["tokens"] // 8), "max_tokens": 8}
        assert cached(world.post("completions", part)) > 100
        assert world.kv()["violations"] == 0


def requests_in(slots):
    return [slot for slot in slots if slot["operation"] == "request"]


def test_what_needs_no_slot_waits_for_none(tmp_path):
    forever = {"max_tokens": 8000, "stream": True, "ignore_eos": True}
    with llama_world(tmp_path, slots=1, ctx=16384) as world, begin(world, "ship night ", **forever):
        world.until(lambda: requests_in(world.slots()), "a stream")
        base = world.kvpin.url
        for path in ("/v1/health", "/props", "/lora-adapters"):
            httpx.get(base + path, timeout=5, trust_env=False).raise_for_status()
        tokenised = httpx.post(f"{base}/tokenize", json={"content": "ship"}, timeout=5, trust_env=False)
        assert tokenised.json()["tokens"]
        assert requests_in(world.slots()), "it runs on"


def begin(world, prompt, **fields):
    """A client that has sent a request and has read nothing yet."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, **fields}
    raw = json.dumps(body).encode()
    host, port = world.kvpin.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(raw)}\r\n\r\n"
    client.sendall(head.encode() + raw)
    return client


def has_answer(client):
    return bool(select.select([client], [], [], 0)[0])
