"""What a llama-server can do, as it was started."""

from __future__ import annotations

import pytest

from engine_adapter import (
    Capability,
    EngineSpecError,
    KvTarget,
    KvVerb,
    NotSupported,
    make_adapter,
)
from tests.engine_adapter.llama_server.slot_world import prompt_of, slot_world
from tests.engines import engine_spec

PLAIN = {Capability.CACHED_TOKENS, Capability.TOKENIZE}
SLOTS = PLAIN | {Capability.KV_EVENTS, Capability.CACHE_SALT, Capability.PIN}
FILES = SLOTS | {Capability.FLUSH, Capability.OFFLOAD, Capability.RESTORE}


class TestWhatItCanDo:
    async def test_all_of_it_with_a_save_path_and_its_directory(self, world):
        info = await world.adapter.connect()
        assert info.capabilities == FILES
        assert (info.max_model_len, info.gpu_blocks, info.tokens_per_block) == (1024, 128, 16)
        assert info.vocab_size == 4096
        assert world.adapter.findings() == ()

    async def test_slots_alone_without_the_directory(self, start_llama, save_dir):
        server = start_llama(slots=2, save_dir=save_dir)
        async with slot_world(server.url) as world:
            assert (await world.adapter.connect()).capabilities == SLOTS | {Capability.FLUSH}
            with pytest.raises(NotSupported, match="host_cache_dir"):
                await world.do(KvVerb.OFFLOAD)
            assert (await world.ask(prompt_of(1)))[1:] == (0, 0)
            assert (await world.ask(prompt_of(1)))[1:] == (99, 99)

    async def test_nor_without_a_save_path(self, start_llama, save_dir):
        server = start_llama(slots=2)
        async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
            assert (await world.adapter.connect()).capabilities == SLOTS
            assert "--slot-save-path" in " ".join(map(str, world.adapter.findings()))
            with pytest.raises(NotSupported, match="--slot-save-path"):
                await world.do(KvVerb.FLUSH)
            assert (await world.ask(prompt_of(1)))[1:] == (0, 0)
            assert (await world.ask(prompt_of(1)))[1:] == (99, 99)

    @pytest.mark.parametrize("flag", ["-kvu", "--no-slots"])
    async def test_left_to_itself_where_slots_cannot_be_kept(self, start_llama, save_dir, flag):
        server = start_llama(flag, slots=2, save_dir=save_dir)
        async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
            assert (await world.adapter.connect()).capabilities == PLAIN
            stats = await world.adapter.stats()
            assert stats["slots"] == []
            assert flag.removeprefix("--no-") in " ".join(map(str, world.adapter.findings()))
            assert world.adapter.forecast(KvTarget(prompt_of(1))) is None
            async with world.hold(prompt_of(1)) as hold:
                assert hold.body.get("id_slot") is None
                async with await world.sent(hold) as response:
                    assert response.status == 200

    async def test_no_word_for_a_server_with_a_cache_of_its_own(self, start_llama, save_dir):
        server = start_llama("--cache-ram", "64", slots=2, save_dir=save_dir)
        async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
            assert (await world.adapter.connect()).capabilities == FILES - {Capability.CACHE_SALT}
            assert "--cache-ram 0" in " ".join(map(str, world.adapter.findings()))
            assert "start it with --cache-ram 0" in str(world.adapter.not_supported(Capability.CACHE_SALT))
            async with world.hold(prompt_of(1)) as hold:
                assert not hold.firm
            assert not world.adapter.forecast(KvTarget(prompt_of(1))).firm
            for salt in ("a", "b", "a"):
                assert (await world.ask(prompt_of(2), salt=salt))[1] == 0

    def test_one_directory_has_one_description(self, save_dir):
        specs = [
            engine_spec("llama_server", "http://127.0.0.1:1", "a", host_cache_dir=str(save_dir), **cap)
            for cap in ({"host_cache_bytes": 1 << 20}, {"host_cache_bytes": 2 << 20})
        ]
        first = make_adapter(specs[0])
        with pytest.raises(EngineSpecError, match="different bytes"):
            make_adapter(specs[1])
        assert first.spec is specs[0]
