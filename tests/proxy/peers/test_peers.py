"""Several proxies in front of the same engines. The engines send no events: proxies know of each other only
by the exchange."""

import asyncio
import time

import msgspec
from structlog.testing import capture_logs

from proxy.control.engines import stats
from proxy.control.kv import PinAnswer
from proxy.core.books import MAX_SKEW_S, EngineMark, IssuedKey, encode_marks, signed
from proxy.core.peers.messages import KvpinState, Leaving, frame_of
from proxy.core.placement.load import LoadSample, Work
from proxy.core.retention import AdminPin
from proxy.fleet.engine import order_name
from proxy.peers import peers as peers_module
from tests.fakes import client_of, proxy_over
from tests.kv_world import tokens
from tests.proxy.peers.world import Gated, Wire, ask, in_flight, in_step, open_all, placer, shut, until, world


async def test_only_paths_that_the_exchange_reaches_are_believed(wires):
    async with world(lambda _owner: Wire(wires)) as (_engines, (one, two)):
        one.peers.bus.reaches = lambda socket: socket == "/run/two.http"
        for number, path in enumerate(("/etc/socket", "/run/two.http", None)):
            other = frame_of(two.peers._owner, [KvpinState("x", [], path)])
            one.peers._receive(other)
            assert one.peers.sockets() == ["/run/two.http"] * (number == 1)


async def test_a_silent_one_is_lost_and_comes_back(wires, monkeypatch):
    monkeypatch.setattr(peers_module, "LOST_S", 0.3)
    async with world(lambda _: Wire(wires)) as (engines, (one, two)), client_of(one) as client:
        shut(engines)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(ask(client, stream=True))
            await until(lambda: in_flight(two))
            wires[0].is_cut = True
            await until(lambda: not two.peers.stats().peers)
            assert in_flight(two) == 0
            assert not any(placer(two).index.counts(name)[3] for name in "ab")
            assert two.peers.stats().lost == 1
            wires[0].is_cut = False
            await until(lambda: in_step(one) and in_step(two))
            assert in_flight(two)
            open_all(engines)
            await running
        await two.settled()


async def test_an_engine_that_joined_the_other_one_before_is_shared_too(wires):
    async with world(lambda _: Wire(wires)) as (_, (one, two)), Gated("c") as late:
        one.add(late)
        (peer,) = two.peers._peers.values()
        await until(lambda: len(peer.engines) == 3)
        two.add(late)
        await until(lambda: two.peers.stats().peers[0].engines == 3)


async def test_one_that_stops_is_gone_at_once(unix):
    async with world(unix) as (_, (one, two)):
        await one.peers.aclose()
        await until(lambda: not two.peers.stats().peers)
        assert two.peers.stats().lost == 0


class ToOtherVersion(Wire):
    """An exchange between kvpins of different releases: each hears frames of another version."""

    def publish(self, frame):
        super().publish(bytes([frame[0] + 1]) + frame[1:])


async def test_kvpins_of_two_versions_serve_side_by_side_and_share_nothing(wires, monkeypatch):
    monkeypatch.setattr(peers_module, "JOIN_S", 0.2)
    async with Gated("a") as engine:
        over = {"reuse": True, "exchange": lambda _owner: ToOtherVersion(wires)}
        with capture_logs() as logs:
            async with proxy_over(engine, **over) as one, proxy_over(engine, **over) as two:
                await until(lambda: one.peers.is_ready and two.peers.is_ready)
                async with client_of(one) as client, client_of(two) as other:
                    assert (await ask(client)).status_code == (await ask(other)).status_code == 200
                assert (one.peers.stats().peers, two.peers.stats().peers) == ([], [])
                assert [proxy.fleet.engines["a"].ledger.placed for proxy in (one, two)] == [1, 1]
        told = [log for log in logs if log["event"].startswith("another kvpin has another version")]
        assert len(told) == 2  # one warning of each, however many frames come


async def test_strange_frames_are_borne_and_one_has_a_name_though_it_told_none(wires):
    async with world(lambda _: Wire(wires)) as (_, (one, _two)):
        broken = msgspec.msgpack.encode([[7, one.peers._owner, "a", None, [b"123"]]])
        nested = b"\x91" * 10_000 + b"\xc0"
        deep, deep_mark = (
            b"\x91\x92\x09",
            b"\x91\x97" + encode_marks([EngineMark("a", drained=True, at=1.0)])[2:],
        )
        with capture_logs() as logs:
            for messages in (broken, deep + nested):
                wires[0].ears.receive(frame_of(7, [])[:9] + messages)
            wires[0].ears.kept(deep_mark + nested)
            wires[0].ears.receive(frame_of(7, [Leaving(), KvpinState("x", []), Leaving()]))
        assert in_step(one)
        stopped = [each["peer"] for each in logs if each["event"] == "another kvpin has stopped"]
        assert stopped == ["0000000000000007"]


async def test_a_newcomer_knows_all_before_it_is_ready(unix):
    async with world(unix) as (engines, (one, two)), client_of(one) as client:
        for number in range(5):
            await ask(client, tokens(400, number), session_id=f"chat {number}")
        placer(one).books["b"].rates.learn(LoadSample(Work(1024), 4.0, 0.0))
        shut(engines)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(ask(client, stream=True))
            await until(lambda: in_flight(one))
            async with proxy_over(*engines, reuse=True, exchange=unix) as three, client_of(three) as own:
                assert (await own.get("/health/ready")).status_code == 503
                await until(lambda: three.peers.is_ready)
                ready = await own.get("/health/ready")
                assert (ready.status_code, ready.json()["exchange"]) == (200, "ok")
                for name in "ab":
                    assert placer(three).index.held(name, "gpu") == placer(one).index.held(name, "gpu")
                    assert placer(three).index.counts(name)[3] == placer(one).index.counts(name)[3]
                assert dict(placer(three)._sessions) == dict(placer(one)._sessions)
                assert placer(three).rates.prefill_tok_s == placer(one).rates.prefill_tok_s == 256
                assert in_flight(three) == 1
                open_all(engines)
                await running
                await three.settled()
        await two.settled()


async def test_a_drain_at_one_is_known_to_the_others_and_to_a_newcomer(unix):
    def drained(proxy):
        return [engine.id for engine in proxy.fleet.engines.values() if proxy.fleet.is_drained(engine)]

    async with world(unix) as (engines, (one, two)):
        name = order_name(one.fleet.engine("a").adapter.spec)
        one.fleet.book.drain(name, drained=True, now=2.0)
        await until(lambda: drained(two) == ["a"])
        async with proxy_over(*engines, reuse=True, exchange=unix) as three:
            await until(lambda: three.peers.is_ready)
            assert drained(three) == ["a"]
            two.fleet.book.drain(name, drained=False, now=1.0)
            await until(lambda: not any(map(drained, (one, two, three))))


async def test_an_order_from_the_future_is_not_taken_over_and_the_log_names_the_clocks(unix):
    async with world(unix) as (_, (one, two)):
        name = order_name(one.fleet.engine("a").adapter.spec)
        with capture_logs() as logs:
            one.fleet.book.drain(name, drained=True, now=1e300)
            await until(lambda: any("set the clocks" in each["event"] for each in logs))
        assert not two.fleet.book.is_drained(name)


def issued(*names, removed=False):
    return [IssuedKey(name, "t", name.encode(), "last", 1.0, removed=float(removed)) for name in names]


async def test_an_issued_key_is_known_to_the_others_and_to_a_newcomer_and_so_is_its_removal(unix):
    def keys(proxy):
        return {key.digest for key in proxy.tenants.keys}

    async with world(unix) as (engines, (one, two)):
        one.tenants.issued.merge(issued("k", "other"))
        await until(lambda: keys(two) == {b"k", b"other"})
        async with proxy_over(*engines, reuse=True, exchange=unix) as three:
            await until(lambda: three.peers.is_ready)
            assert keys(three) == {b"k", b"other"}
            three.tenants.issued.merge(issued("k", removed=True))
            await until(lambda: all(keys(each) == {b"other"} for each in (one, two)))
        assert not one.tenants.open


async def test_who_lacks_the_secret_issues_no_key(wires):
    """Whoever may publish to a Redis channel could otherwise let himself in."""
    async with world(lambda _: Wire(wires)) as (_, (one, two)):
        two.peers._secret = lambda: b"another"
        now = time.time()
        whole = signed(issued("k"), b"", now)
        forged = [signed(issued("k"), b"a guess", now), whole[:-1], b"\xff" * 40, b"x"]
        with capture_logs() as logs:
            for number, told in enumerate(forged):
                state = KvpinState("evil", [], keys=told)
                wires[0].ears.receive(frame_of(100 + number, [state]))
            one.tenants.issued.merge(issued("own"))
            await until(lambda: sum("same admin_key" in each["event"] for each in logs) == 2)  # once at each
        assert [key.digest for key in one.tenants.keys] == [b"own"]
        assert two.tenants.open
        two.peers._secret = lambda: b""
        one.tenants.issued.merge(issued("own", removed=True))
        await until(lambda: not two.tenants.open)


async def test_an_old_message_that_is_repeated_opens_no_key_where_others_may_write(wires):
    """It was told before the key was removed, and whoever may publish to a Redis channel has kept it."""
    async with world(lambda _: Wire(wires)) as (_, (one, two)):
        old = signed(issued("k"), b"", time.time() - 2 * MAX_SKEW_S)
        one.peers._secret = two.peers._secret = lambda: b""
        for proxy, is_private, keys in ((one, False, []), (two, True, [b"k"])):
            proxy.peers.bus.is_private = is_private
            proxy.peers._take_keys(old)
            assert [key.digest for key in proxy.tenants.keys] == keys


async def test_keys_that_did_not_count_are_asked_for_until_they_do(wires, monkeypatch):
    """A removed key would stay open where the admin key is changed later, or where the clock was wrong."""
    monkeypatch.setattr(peers_module, "AGAIN_S", 0.05)
    async with world(lambda _: Wire(wires)) as (_, (one, two)):
        one.tenants.issued.merge(issued("k"))
        await until(lambda: not two.tenants.open)
        one.peers._secret = lambda: b"the new admin key"
        with capture_logs() as logs:
            one.tenants.issued.merge(issued("k", removed=True))
            await until(lambda: any("same admin_key" in each["event"] for each in logs))
        assert len([*two.tenants.keys]) == 1
        two.peers._secret = one.peers._secret
        await until(lambda: not [*two.tenants.keys])


async def test_without_a_secret_keys_stay_here(wires):
    async with world(lambda _: Wire(wires)) as (_, (one, two)):
        one.peers._secret = lambda: None
        with capture_logs() as logs:
            one.tenants.issued.merge(issued("own"))
            one.peers._take_keys(signed(issued("k"), b"", time.time()))
            await asyncio.sleep(0.1)
        assert (two.tenants.open, len([*one.tenants.keys])) == (True, 1)
        assert {each["event"].partition(":")[0] for each in logs} == {
            "issued keys stay at this kvpin", "issued keys of another kvpin do not count here",
        }  # fmt: skip


async def test_pins_of_one_are_known_to_the_others_while_they_hold(unix):
    async with world(unix) as (_, (one, two)):
        one.fleet.pins.add(AdminPin("p", {"a": "own"}, 3, time.monotonic() + 60, "prefix"))
        await until(two.peers.pins)
        ((kvpin, pin),) = two.peers.pins()
        assert (kvpin, pin.pin_id, pin.engines, pin.blocks) == (one.fleet.name, "p", ["a"], 3)
        assert 50 < pin.expires - time.time() <= 60
        (shown,) = (await stats(two.fleet, [], two.peers, reuse=True)).pins
        assert (shown.target, shown.kvpin) == ("prefix", one.fleet.name)
        own = PinAnswer(pin_id="p", target="prefix", engines=[], blocks=3, expires_in_s=1)
        assert (await stats(two.fleet, [own], two.peers, reuse=True)).pins == [own]
        one.fleet.pins.take("p", 0.0)
        await until(lambda: not two.peers.pins())


async def test_what_one_learned_during_a_partition_is_told_after_it(wires, monkeypatch):
    monkeypatch.setattr(peers_module, "LOST_S", 0.3)
    async with world(lambda _: Wire(wires)) as (_, (one, two)), client_of(one) as client:
        wires[0].is_cut = True
        await until(lambda: not one.peers.stats().peers and not two.peers.stats().peers)
        home = (await ask(client)).headers["x-kvpin-engine"]
        assert placer(two).index.held(home, "gpu") == 0
        wires[0].is_cut = False
        await until(lambda: placer(two).index.held(home, "gpu") == 20)
