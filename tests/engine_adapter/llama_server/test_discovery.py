"""What real servers with all kinds of flags are found to be."""

from __future__ import annotations

import re
import shutil
from contextlib import contextmanager
from dataclasses import replace

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from engine_adapter.errors import EngineSpecError, EngineUnavailable
from engine_adapter.llama_server.checkpoints import PLAIN, MemoryKind, MemoryRules
from engine_adapter.llama_server.discovery import (
    ServerFacts,
    discover,
    file_digest,
    findings_of,
    memory_rules,
    model_parts,
    probe,
)
from engine_adapter.llama_server.slot_io import SlotState, spare_slot
from engine_adapter.types import EngineSpec
from scripts.make_gguf import gguf_path
from tests.engines import served

RAM = ("--cache-ram", "512")

FILE = "probe.bin"


def spec_of(url):
    return EngineSpec(kind="llama_server", url=url, id="e")


@pytest.fixture
def found(start_llama, control_of):
    """Starts a server, discovers and probes it: `await found("-kvu", slots=2)`."""

    async def find(*flags, **options):
        server = start_llama(*flags, **options)
        control = control_of(server.url)
        facts = await discover(control, spec_of(server.url))
        return await probe(control, facts, facts.slots - 1, file=FILE)

    return find


async def test_the_flags_of_a_plain_start(found):
    """No -np, so four slots on one pool; no --cache-ram, so it is on; no --slot-save-path."""
    facts = await found("-np", "-1", "-c", "0", *RAM)
    assert (facts.slots, facts.ram_cache, facts.is_unified, facts.can_save) == (4, True, None, False)
    assert facts.looks_unified
    ram, pool, save = map(str, findings_of(facts))
    assert "--cache-ram 0" in ram
    assert "may share" in pool
    assert "-no-kvu -np 4 -c 4*CTX" in pool
    assert "--slot-save-path DIR" in save


@pytest.mark.parametrize(("slots", "shape"), [(2, "tiny"), (8, "tiny"), (2, "swa")])
@pytest.mark.parametrize("flag", ["-kvu", "-no-kvu"])
async def test_a_unified_pool_is_found_whatever_the_slots_and_caches(found, save_dir, flag, slots, shape):
    facts = await found(flag, slots=slots, ctx=512, save_dir=save_dir, model=gguf_path(shape))
    assert facts.is_unified is facts.looks_unified is (flag == "-kvu")
    assert [finding for finding in findings_of(facts) if "slots share one KV pool" in finding.problem] == (
        [*findings_of(facts)] if facts.is_unified else []
    )
    assert len([*findings_of(facts)]) == facts.is_unified


# --- what has to be tried out ----------------------------------------------------------------------------

SAVED = {"n_erased": 0, "n_saved": 0, "timings": {"save_ms": 1, "cache_n": 0}}
WINDOW = MemoryKind(is_recurrent=False, has_window=True, has_checkpoints=True, has_window_in_files=True)


async def test_a_probe_touches_its_slot_alone(start_llama, control_of, save_dir):
    control = control_of(start_llama(slots=2, save_dir=save_dir).url)
    prompt = {"prompt": list(range(500, 600)), "n_predict": 0}
    for slot_id in (0, 1):
        await control.call("POST", "/completion", json={**prompt, "id_slot": slot_id})
    await probe(control, await discover(control, spec_of("http://s")), 1, file=FILE)
    reused = [
        (await control.call("POST", "/completion", json={**prompt, "id_slot": slot_id}))["timings"]["cache_n"]
        for slot_id in (0, 1)
    ]
    assert reused == [99, 0]


async def test_a_server_whose_save_directory_is_gone_is_used_without_saves(start_llama, control_of, tmp_path):
    save_dir = tmp_path / "kv"
    save_dir.mkdir()
    control = control_of(start_llama(slots=2, save_dir=save_dir).url)
    save_dir.rmdir()
    facts = await probe(control, await discover(control, spec_of("http://s")), 0, file=FILE)
    assert not facts.can_save
    assert "no prefix can be saved" in [*map(str, findings_of(facts))][-1]


@pytest.mark.parametrize("n_written", [0, 35, 40, 46, 4000])
async def test_a_file_of_unknown_size_tells_nothing(control_of, n_written):
    saved = SAVED | {"n_written": n_written}
    with answering({"/slots/0": saved, "/completion": saved}) as url:
        assert (await probe(control_of(url), FACTS, 0, file=FILE)).is_unified is None


async def test_a_server_that_refuses_the_fixed_prompt_is_used(control_of):
    """Its vocabulary is smaller, for example."""

    async def complete(request):
        is_refused = (await request.json())["n_predict"] > 0
        return JSONResponse(SAVED, status_code=400 if is_refused else 200)

    slots = Route("/slots/0", lambda _: JSONResponse(SAVED | {"n_written": 40}), methods=["POST"])
    with served(Starlette(routes=[slots, Route("/completion", complete, methods=["POST"])])) as url:
        facts = await probe(control_of(url), FACTS, 0, file=FILE)
    assert (facts.ram_cache is None, facts.continues) == (False, ())


@pytest.mark.parametrize(("shape", "flags", "rules", "flag"), [
    ("tiny", (), PLAIN, None),
    ("swa", (), MemoryRules(512, window=128), "--swa-full"),
    ("sinks", (), MemoryRules(512, window=128), "--swa-full"),
    ("swa", ("--swa-full",), replace(PLAIN, loses_window=True), None),
    ("linear", (), MemoryRules(512, is_recurrent=True), None),
    ("conv", (), MemoryRules(512, is_recurrent=True), None),
    ("linear", ("--ctx-checkpoints", "0"), MemoryRules(512, is_recurrent=True, most=0), "--ctx-checkpoints"),
])  # fmt: skip
async def test_the_memory_of_a_server_is_found_out(found, save_dir, shape, flags, rules, flag):
    facts = await found(*flags, model=gguf_path(shape), slots=2, ctx=512, save_dir=save_dir)
    assert memory_rules(facts.kind, facts) == rules
    assert [file.name for file in save_dir.iterdir()] == [FILE]
    told = [str(each) for each in findings_of(replace(facts, memory=rules))]
    assert [each for each in told if "--swa-full" in each or "--ctx-checkpoints" in each] == told
    assert (flag is None) == (not told)
    assert flag is None or flag in told[0]


async def test_a_server_that_cannot_save_is_tried_out_too(found):
    facts = await found("--ctx-checkpoints", "0", model=gguf_path("swa"), slots=1, ctx=512)
    assert facts.kind == MemoryKind(
        is_recurrent=False, has_window=True, has_checkpoints=False, has_window_in_files=False
    )


@pytest.mark.parametrize("shape", ["tiny", "swa"])
async def test_beside_a_ram_cache_only_files_tell(found, save_dir, shape):
    facts = await found(*RAM, model=gguf_path(shape), slots=2, ctx=512, save_dir=save_dir)
    assert facts.kind == MemoryKind(
        is_recurrent=False, has_window=False, has_checkpoints=True, has_window_in_files=shape == "swa"
    )


async def test_a_window_that_no_file_tells_is_a_guess(found, tmp_path):
    facts = await found(slots=1)
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    for model in (None, other, tmp_path / "none.gguf", gguf_path("tiny")):
        rules = memory_rules(WINDOW, replace(facts, local_model=model))
        assert (rules.window, rules.is_sure) == (1024, False)


# --- which model, and what its files fit --------------------------------------------------------


async def test_files_fit_the_same_model_with_the_same_streams(found, save_dir):
    here, there, fewer, pool, pool_of_two, single, other = [
        (await found(*flags, slots=slots, ctx=512, save_dir=save_dir, model=gguf_path("tiny", seed))).key
        for flags, slots, seed in [
            ((), 4, 0), ((), 4, 0), ((), 2, 0), (("-kvu",), 4, 0), (("-kvu",), 2, 0), ((), 1, 0), ((), 4, 1),
        ]
    ]  # fmt: skip
    assert here == there
    assert pool == pool_of_two == single
    assert len({here, fewer, pool, other}) == 4


async def test_flags_that_change_kv_make_another_key(found, save_dir):
    flags = [
        (), (), ("--rope-freq-base", "50"), ("--override-kv", "llama.rope.freq_base=float:777"),
        ("--rope-scaling", "yarn", "--rope-scale", "8", "--yarn-orig-ctx", "512"),
    ]  # fmt: skip
    facts = [await found(*each, slots=2, ctx=512, save_dir=save_dir) for each in flags]
    assert len({each.fingerprint for each in facts}) == 1
    keys = [each.key for each in facts]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4
    sampling = ("--repeat-penalty", "2", "--xtc-probability", "0.9", "--dynatemp-range", "0.5")
    assert (await found(*sampling, slots=2, ctx=512, save_dir=save_dir)).key == keys[0]
    # Without a probe, a process shares its files with no other.
    assert len({replace(each, continues=()).key for each in facts}) == len(flags)


async def test_a_model_out_of_reach(start_llama, control_of, tmp_path):
    """The server keeps the file open; here it is gone."""
    prints = set()
    for seed in (0, 0, 1):
        model = shutil.copy(gguf_path("tiny", seed), tmp_path / "model.gguf")
        server = start_llama(model=model)
        model.unlink()
        facts = await discover(control_of(server.url), spec_of(server.url))
        assert facts.local_model is None
        prints.add(facts.fingerprint)
    assert len(prints) == 2


async def test_another_file_of_that_name_is_not_the_model(start_llama, control_of, tmp_path):
    model = shutil.copy(gguf_path("tiny"), tmp_path / "model.gguf")
    server = start_llama("--no-slots", model=model)
    model.unlink()
    model.write_bytes(b"GGUF" + bytes(100))
    assert (await discover(control_of(server.url), spec_of(server.url))).local_model is None


# --- slots ---------------------------------------------------------------------------------------


def test_the_spare_slot_is_idle_and_has_least():
    def slot(id_, n_tokens, is_processing=False):
        return SlotState(id_, 512, is_processing, None, n_tokens)

    assert spare_slot([slot(0, 9), slot(1, 5), slot(2, None, is_processing=True)]) == 1
    assert spare_slot([slot(0, 9), slot(1, None)]) == 1
    assert spare_slot([slot(0, 9, is_processing=True), slot(1, 3, is_processing=True)]) == 1


# --- what is no llama-server ---------------------------------------------------------------------


@contextmanager
def answering(answers):
    """A server with these answers, by route; yields its address."""

    async def answer(request):
        return JSONResponse(answers[request.url.path])

    routes = [Route(path, answer, methods=["GET", "POST"]) for path in answers]
    with served(Starlette(routes=routes)) as url:
        yield url


PROPS = {"total_slots": 1, "default_generation_settings": {"n_ctx": 8}, "model_path": "/m"}


@pytest.mark.parametrize(
    ("answers", "error", "message"),
    [
        ({}, EngineSpecError, "is no llama-server: it has no /props"),
        ({"/props": {"role": "?"}}, EngineSpecError, "as no known llama-server does: .*total_slots"),
        ({"/props": []}, EngineSpecError, "as no known llama-server does: Expected"),
        ({"/props": {**PROPS, "total_slots": 0}}, EngineSpecError, "has no slots"),
        ({"/props": PROPS, "/v1/models": {"data": []}}, EngineUnavailable, "names no model"),
        ({"/props": PROPS, "/v1/models": []}, EngineUnavailable, "names no model"),
    ],
)
async def test_what_is_no_llama_server(control_of, answers, error, message):
    with answering(answers) as url, pytest.raises(error, match=message):
        await discover(control_of(url), spec_of(url))


@pytest.mark.parametrize("meta", [True, ["x"], {"n_ctx_train": "8", "n_vocab": -1, "size": {}}])
async def test_what_it_says_of_its_model_may_be_odd(control_of, meta):
    models = {"data": [{"id": "m", "meta": meta}]}
    answers = {"/props": {**PROPS, "model_path": "/m\0"}, "/v1/models": models}
    with answering(answers | {"/completion": {"tokens": [1]}}) as url:
        facts = await discover(control_of(url), spec_of(url))
    assert (facts.train_ctx, facts.vocab_size, facts.local_model) == (None, None, None)


async def test_what_makes_other_kv(control_of):
    """Of a model whose file kvpin cannot read: its name, its shape, what it says, and its adapters."""
    same = {"/props": PROPS, "/v1/models": {"data": [{"id": "m"}]}, "/completion": {"tokens": [1]}}
    same["/lora-adapters"] = []
    other = (
        {"/props": PROPS | {"model_path": "/n"}},
        {"/v1/models": {"data": [{"id": "m", "meta": {"n_embd": 8}}]}},
        {"/completion": {"tokens": [2]}},
        {"/lora-adapters": [{"id": 0, "scale": 1.0}]},
        {"/lora-adapters": [{"id": 0, "scale": 0.5}]},
    )
    answers, prints = {**same}, []
    with answering(answers) as url:
        for changes in ({}, {}, *other):
            answers.update(same | changes)
            prints.append((await discover(control_of(url), spec_of(url))).fingerprint)
    assert prints[0] == prints[1]
    assert len(set(prints)) == 6


MIB = 1 << 20


@pytest.fixture
def model(tmp_path):
    return shutil.copy(gguf_path("tiny"), tmp_path / "model.gguf")


def change(path, offset, length=1):
    with path.open("r+b") as file:
        file.seek(offset)
        was = file.read(length)
        file.seek(offset)
        file.write(bytes(byte ^ 0xFF for byte in was))


@pytest.mark.parametrize(
    ("at", "length"),
    # A byte of either end, or a tensor of 32 kB between them: samples lie 16 kB apart.
    [(0, 1), (MIB - 1, 1), (-1, 1), (-MIB, 1), (0.2, 32 << 10), (0.5, 32 << 10), (0.81, 32 << 10)],
)
def test_a_file_that_was_changed_is_another_model_and_a_copy_is_the_same(model, at, length):
    before, size = file_digest(model), model.stat().st_size
    assert before == file_digest(gguf_path("tiny"))
    change(model, int(at * size if isinstance(at, float) else at) % size, length)
    assert file_digest(model) != before


def test_parts_count_as_one_model(tmp_path):
    parts = [tmp_path / f"m-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    for part in parts:
        part.write_bytes(part.name.encode() * 100)
    assert model_parts(parts[0]) == parts
    before = file_digest(parts[0])
    change(parts[2], 50)
    assert file_digest(parts[0]) != before
    parts[1].unlink()
    with pytest.raises(FileNotFoundError):
        file_digest(parts[0])


FACTS = ServerFacts(
    model="m",
    card={},
    slots=4,
    slot_ctx=512,
    train_ctx=2048,
    local_model=None,
    vocab_size=None,
    build="",
    chat_template="",
    instance=None,
    is_sleeping=False,
    has_slots=True,
    can_save=True,
    fingerprint="f",
)


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        (
            {"slot_ctx": 2048, "is_unified": None, "ram_cache": None},
            "not known yet whether its slots share one KV pool.*kvpin doctor --probe finds out",
        ),
        (
            {"slot_ctx": 2048, "is_unified": None, "ram_cache": False},
            r"its slots may share one KV pool.*cannot tell.*--slot-save-path DIR.*-np 4 -c 4\*CTX",
        ),
        ({"has_draft": True}, "draft model.*nothing is saved or restored.*without --model-draft"),
        ({"cache_reuse": 64}, "cache_reuse has no effect.*leave it out"),
        ({"is_sleeping": True}, "it sleeps when idle.*--sleep-idle-seconds"),
    ],
)
def test_what_servers_in_other_tests_do_not_lack_is_named_too(changes, finding):
    (found,) = findings_of(replace(FACTS, **changes))
    assert re.search(finding, str(found))
