"""What a vLLM says of how it passes KV on, and what kvpin makes of it."""

from contextlib import asynccontextmanager

import pytest

from engine_adapter import Role, make_adapter
from engine_adapter.vllm.kv_transfer import KvTransfer, findings_of_transfer, transfer_of
from tests.engines import engine_spec
from tests.fake_engines.vllm import running_vllm

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


@asynccontextmanager
async def connected(told, **fields):
    """An adapter of a server that says this, and what its connection told."""
    with running_vllm(kv_transfer_config=told) as server:
        adapter = make_adapter(engine_spec("vllm", server.url, **fields))
        try:
            yield adapter, await adapter.connect()
        finally:
            await adapter.aclose()


@pytest.mark.parametrize(
    ("says", "role"),
    [("kv_producer", Role.PREFILL), ("kv_consumer", Role.DECODE), ("kv_both", Role.BOTH), (None, Role.BOTH)],
)
async def test_a_server_in_dev_mode_says_its_role(says, role):
    async with connected(NIXL | {"kv_role": says}) as (adapter, info):
        assert info.role is role
        assert adapter.transfer is not None, "without a role, it passes KV both ways"
        assert adapter.findings() == ()


@pytest.mark.parametrize("told", [None, {}, {"kv_connector": "MultiConnector", "kv_role": "kv_both"}])
async def test_an_engine_without_role_whose_connector_is_not_known_passes_nothing_on(told):
    async with connected(told) as (adapter, _):
        assert adapter.transfer is None
        assert adapter.findings() == ()


async def test_outside_dev_mode_the_operator_says_that_it_passes_kv_on():
    async with connected(None, kv_transfer="nixl", kv_lease_s=12.0) as (adapter, info):
        assert (info.role, adapter.transfer.usable_s) == (Role.BOTH, 7.0)
    async with connected({}, kv_transfer="nixl") as (adapter, _):
        assert adapter.transfer is None
        assert "it has kv_transfer=nixl and no NixlConnector" in adapter.findings()[0].problem


async def test_settings_say_more_than_the_server():
    async with connected(NIXL | {"kv_role": "kv_consumer"}, role=Role.PREFILL) as (_, info):
        assert info.role is Role.PREFILL


@pytest.mark.parametrize("role", list(Role))
async def test_where_the_server_says_nothing_the_settings_hold(role):
    async with connected(None, role=role) as (adapter, info):
        assert info.role is role
        assert (adapter.transfer is not None) == (role is not Role.BOTH)


async def test_a_server_that_says_it_otherwise_is_used_as_one_that_says_nothing():
    async with connected("VllmConfig(kv_transfer_config=None)", role=Role.DECODE) as (adapter, info):
        assert info.role is Role.DECODE
        assert adapter.transfer is not None


async def test_a_server_that_passes_nothing_on_is_in_no_pair():
    async with connected({}, role=Role.DECODE) as (adapter, _):
        assert adapter.transfer is None
        (finding,) = adapter.findings()
        assert "it has role=decode and no NixlConnector: it is in no pair" in finding.problem
        assert "--kv-transfer-config" in finding.remedy


def spec_of(role=Role.DECODE, **options):
    return engine_spec("vllm", "http://127.0.0.1:1", role=role, **options)


def told_of(**fields) -> KvTransfer:
    return KvTransfer(**(NIXL | fields))


class TestTransferOf:
    @pytest.mark.parametrize(
        ("own", "set_s", "usable_s"),
        [(None, 30.0, 25.0), (60, 30.0, 25.0), (10.5, 30.0, 5.5), (60, 90.0, 55.0)],
    )
    def test_the_shorter_lease_holds(self, own, set_s, usable_s):
        extra = {} if own is None else {"kv_lease_duration": own}
        told = told_of(kv_connector_extra_config=extra)
        assert transfer_of(spec_of(kv_lease_s=set_s), told).usable_s == usable_s

    def test_one_that_is_too_short_to_be_used(self):
        told = told_of(kv_connector_extra_config={"kv_lease_duration": 5})
        assert transfer_of(spec_of(), told) is None
        (finding,) = findings_of_transfer(spec_of(), told)
        assert "for 5 s: too short to be used" in finding.problem

    @pytest.mark.parametrize("connector", [None, "LMCacheMPConnector", "NixlPushConnector"])
    def test_other_connectors_pass_nothing_on_that_kvpin_knows(self, connector):
        assert transfer_of(spec_of(), told_of(kv_connector=connector)) is None

    def test_the_connector_has_two_names(self):
        told = told_of(kv_connector="NixlPullConnector")
        for role in Role:
            assert transfer_of(spec_of(role), told) is not None
            assert list(findings_of_transfer(spec_of(role), told)) == []

    def test_one_of_several_may_be_the_right_one(self):
        assert transfer_of(spec_of(), told_of(kv_connector="MultiConnector")) is not None

    def test_an_lmcache_has_a_connector_of_its_own(self):
        spec = spec_of(lmcache="http://127.0.0.1:2")
        assert transfer_of(spec, None) is None
        assert list(findings_of_transfer(spec, KvTransfer())) == []


class TestFindings:
    def test_an_engine_that_fails_without_its_kv(self):
        told = told_of(kv_load_failure_policy="fail")
        (finding,) = findings_of_transfer(spec_of(), told)
        assert '"kv_load_failure_policy":"recompute"' in finding.remedy
        assert list(findings_of_transfer(spec_of(Role.PREFILL), told)) == [], "it fetches none"

        assert list(findings_of_transfer(spec_of(Role.BOTH), told)) == [finding]

    @pytest.mark.parametrize("role", list(Role))
    @pytest.mark.parametrize("connector", ["MoRIIOConnector", "MooncakeConnector", "NixlPushConnector"])
    def test_an_engine_that_moves_kv_otherwise(self, role, connector):
        (finding,) = findings_of_transfer(spec_of(role), told_of(kv_connector=connector))
        assert f"it has a {connector}, and kvpin moves KV by NixlConnector alone" in finding.problem
        assert '"kv_connector":"NixlConnector"' in finding.remedy


@pytest.mark.parametrize(
    ("extra", "blocks"),
    [({}, 1), ({"blocks_per_chunk": 4}, 4), ({"block_size": 96}, 3), ({"block_size": "96"}, 1)],
)
def test_a_server_says_how_many_blocks_it_offloads_together(extra, blocks):
    told = KvTransfer("OffloadingConnector", "kv_both", kv_connector_extra_config=extra)
    assert told.offloads
    assert told.blocks_per_chunk(32) == blocks
    assert KvTransfer("NixlConnector", kv_connector_extra_config=extra).blocks_per_chunk(32) == 1


@pytest.mark.parametrize("describes", [True, False])
async def test_chunks_that_events_do_not_describe_are_a_finding(describes):
    extra = {"blocks_per_chunk": 4, "self_describing_kv_events": describes}
    told = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    async with connected(told) as (adapter, _):
        found = [finding.remedy for finding in adapter.findings()]
        assert ["self_describing_kv_events" in remedy for remedy in found] == ([] if describes else [True])
