"""Engines examined: real ones where they are at hand, and wire-exact fakes of the others."""

import httpx
import pytest
import zmq

from engine_adapter import EngineRejected, EngineSpec, EngineSpecError, EngineTaken, EngineUnavailable
from proxy.cli import engine_check as doctor
from proxy.cli.engine_check import examine
from tests.engine_adapter.llama_server.slot_world import prompt_of, slot_world
from tests.fake_engines.sglang import running_sglang
from tests.fake_engines.tensorrt_llm import running_trtllm
from tests.fake_engines.vllm import running_vllm


async def of(url, *, kind="", probe=True, warn=print, **fields):
    common = {name: fields.pop(name) for name in EngineSpec.__slots__ if name in fields}
    return await examine(EngineSpec(kind, url, "x", **common), probe=probe, options=fields, warn=warn)


def said(examination):
    return "\n".join(map(str, examination.findings))


class TestRealEngines:
    async def test_the_embedded_one_is_well(self, embedded_engine):
        found = await of(embedded_engine.url)
        assert (found.spec.kind, found.detected, found.findings) == ("embedded", True, ())
        assert (found.tokenisation.ok, found.tokenisation.source) == (True, "local")
        assert (found.view.state, found.view.complete) == ("current", True)
        assert (found.probe.n_tokens, found.probe.predicted, found.probe.reported) == (49, 48, 48)
        assert "offload" not in found.missing
        assert found.missing["render"]

    async def test_so_is_a_llama_server_that_saves_slots(self, llama):
        warned = list[str]()
        found = await of(llama.url, host_cache_dir=str(llama.save_dir), warn=warned.append)
        assert warned == []  # the lock in its directory tells whether a kvpin uses it
        assert (found.spec.kind, found.findings) == ("llama_server", ())
        assert found.probe.reported == found.probe.predicted > 0

    async def test_a_llama_server_keeps_its_slots_without_a_probe(self, start_llama, save_dir):
        server = start_llama(slots=2, ctx=1024, save_dir=save_dir)
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            for slot in range(2):
                body = {"prompt": list(range(10, 80)), "n_predict": 0, "id_slot": slot}
                (await client.post("/completion", json=body)).raise_for_status()
            held = (await client.get("/slots")).json()
            found = await of(server.url, probe=False)
            assert found.view.state == "current"
            assert (await client.get("/slots")).json() == held

    async def test_beside_a_kvpin_that_uses_it_it_only_looks(self, start_llama, save_dir):
        server = start_llama(slots=2, ctx=1024, save_dir=save_dir)
        async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
            text, *_ = await world.ask(prompt_of(1))
            before = {each: each.read_bytes() for each in save_dir.iterdir()}
            place = {"host_cache_dir": str(save_dir)}
            found = await of(server.url, probe=False, **place)
            assert (found.spec.kind, found.findings) == ("llama_server", ())
            assert {"offload", "cache_salt"} <= found.info.capabilities  # by the probe of the other kvpin
            with pytest.raises(EngineTaken):
                await of(server.url, **place)
            assert {each: each.read_bytes() for each in before} == before
            assert await world.ask(prompt_of(1)) == (text, 99, 99)

    async def test_an_openai_compatible_one_needs_its_tokenizer_named(self, embedded_engine, tokenizer_dir):
        found = await of(embedded_engine.url, kind="openai_compatible", probe=False)
        assert (found.detected, found.probe, found.view.state) == (False, None, "none")
        (finding,) = found.findings
        assert finding.problem.startswith("prompts are not followed")
        assert "tokenizer=" in finding.remedy
        found = await of(embedded_engine.url, kind="openai_compatible", tokenizer=str(tokenizer_dir))
        assert (found.findings, found.tokenisation.ok, found.probe.reported) == ((), False, 48)
        assert "unchecked" in found.tokenisation.detail


class TestTheLargeEngines:
    @pytest.mark.parametrize(
        ("running", "kind"),
        [(running_vllm, "vllm"), (running_sglang, "sglang")],
        ids=["vllm", "sglang"],
    )
    async def test_one_that_is_set_up_well(self, running, kind):
        with running(loras=("ada",)) as engine:
            found = await of(engine.url)
        assert (found.spec.kind, found.info.loras) == (kind, {"ada"})
        assert (found.view.state, found.probe.reported) == ("current", 48)
        assert (found.probe.predicted, found.unseen) == (48, "")

    async def test_events_that_do_not_come(self):
        with running_vllm() as engine, zmq.Context() as context, context.socket(zmq.PUB) as silent:
            port = silent.bind_to_random_port("tcp://127.0.0.1")
            found = await of(engine.url, events=f"tcp://127.0.0.1:{port}")
        assert "reused 48 tokens; its KV events announced 0; make its event address reachable" in said(found)

    async def test_events_that_others_would_miss_are_asked_for_with_the_probe_alone(self):
        with running_trtllm() as engine:
            found = await of(engine.url, probe=False)
            assert (found.spec.kind, found.view.state, engine.fake.polls) == ("tensorrt_llm", "unasked", 0)
            found = await of(engine.url)
            assert engine.fake.polls > 0
        assert (found.view.state, found.probe.predicted, found.probe.reported) == ("current", 96, 96)

    async def test_a_cache_that_is_off(self):
        with running_vllm(enable_prefix_caching=False) as engine:
            found = await of(engine.url)
        assert "reused nothing; turn prefix caching on" in said(found)

    async def test_reuse_that_is_not_told(self):
        with running_vllm(enable_prompt_tokens_details=False) as engine:
            found = await of(engine.url)
        assert found.probe.reported is None
        assert "predictions cannot be checked" in said(found)


LITTLE = {"prompt_tokens_details": {"cached_tokens": 16}}


class TestAnOddEngine:
    @pytest.mark.parametrize(
        ("status", "answer", "said_of_it"),
        [
            (400, {"error": {"message": "text only"}}, "did not serve a prompt of 39 token ids: text only"),
            (200, {"choices": [{"text": "x"}], "usage": LITTLE}, "reused 16 tokens; kvpin predicted 32"),
        ],
        ids=["it refuses", "it reuses less than it should"],
    )
    async def test_an_answer_that_is_a_finding(self, engine, status, answer, said_of_it):
        async def script(exchange):
            if exchange.method == "POST":
                await exchange.send(answer, status=status)
            elif exchange.target in ("/v1/models", "/health"):
                await exchange.send({"data": [{"id": "m", "max_model_len": 40}]})
            else:
                await exchange.send({}, status=404)

        engine.script = script
        found = await of(engine.url)
        assert found.spec.kind == "openai_compatible"
        assert said_of_it in said(found)

    async def test_without_a_probe_nothing_is_asked_of_it_but_what_it_is(self, engine):
        found = await of(engine.url, probe=False)
        assert found.probe is None
        assert {exchange.body for exchange in engine.seen} == {b"", b"{}"}  # its routes, but no prompt

    async def test_one_that_is_not_there(self, engine):
        await engine.stop()
        for kind in ("", "vllm"):
            with pytest.raises(EngineUnavailable):
                await of(engine.url, kind=kind)

    async def test_one_that_hangs(self, engine, monkeypatch):
        async def script(exchange):
            await exchange.left.wait()

        monkeypatch.setattr(doctor, "CONNECT_S", 0.05)
        engine.script = script
        with pytest.raises(EngineUnavailable, match="does not answer within"):
            await of(engine.url, kind="openai_compatible")

    async def test_one_of_another_kind_than_was_said(self, engine):
        async def script(exchange):
            await exchange.send({}, status=404)

        engine.script = script
        with pytest.raises(EngineRejected):
            await of(engine.url, kind="embedded")
        with pytest.raises(EngineSpecError, match="unknown engine kind 'x'"):
            await of(engine.url, kind="x")


@pytest.mark.parametrize("kind", ["embedded", "llama_server", "sglang"])
async def test_the_kind_that_it_seems_to_be_of_is_told_where_the_named_one_does_not_fit(kind):
    with running_trtllm() as engine, pytest.raises(EngineSpecError) as refused:
        await of(engine.url, kind=kind, probe=False)
    assert str(refused.value) == (
        f"{engine.url} is no {kind}: it seems to be of the kind tensorrt_llm; name that one, or no kind"
    )


async def test_another_kind_that_the_named_one_can_work_with_is_a_finding():
    with running_sglang() as engine:
        for kind in ("sglang", "openai_compatible"):
            assert "seems to be" not in said(await of(engine.url, kind=kind, probe=False))
        (finding, *_) = (await of(engine.url, kind="tensorrt_llm", probe=False)).findings
    assert finding.problem.startswith("it seems to be of the kind sglang, not tensorrt_llm")
    assert finding.remedy == f"name that kind: sglang={engine.url}; or name none"


async def test_the_report_holds_no_key(embedded_engine):
    found = await of(embedded_engine.url, probe=False, api_key="secret")
    assert "secret" not in str(found.as_json()) + repr(found)
    assert found.as_json()["view"]["state"] == "current"
