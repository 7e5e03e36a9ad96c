"""What an admitted request holds, and that it gives each thing back once."""

import pytest

from engine_adapter import Headers, JsonBody
from proxy.core.quotas import ByteBudget, TenantLimits
from proxy.errors import BadRequest, NoMemory, RateLimited
from proxy.request.calls import Call
from proxy.request.gate import MOST_ANSWER, USUAL_ANSWER, Gate, deadline_of, priority_of, tokens_of
from proxy.request.tenants import ApiKey, Tenants


def gate_with(bodies=100, **limits):
    return Gate(Tenants([], {"alice": TenantLimits(**limits)}), ByteBudget(bodies))


def running(gate):
    return gate._tenants.quota("alice").take().running


def test_a_request_that_is_denied_leaves_no_trace():
    gate = gate_with(concurrent_requests=1)
    first = gate.admit("alice", None, 0.0)
    with pytest.raises(RateLimited, match="concurrent_requests = 1"):
        gate.admit("alice", None, 0.0)
    first.close()
    first.close()  # counts no second time
    with gate.admit("alice", None, 0.0), pytest.raises(RateLimited):
        gate.admit("alice", None, 0.0)
    assert running(gate) == 0


def test_a_request_that_another_kvpin_has_counted_only_spends_tokens():
    gate = gate_with(requests_per_minute=1, concurrent_requests=1, tokens_per_minute=60)
    for _ in range(3):
        with gate.admit("alice", None, 0.0, is_from_peer=True) as admitted:
            admitted.spend(100)
            assert running(gate) == 0
    with pytest.raises(RateLimited, match="tokens_per_minute"):
        gate.admit("alice", None, 0.0)


def test_what_was_used_counts_under_other_limits_too():
    tenants = Tenants([], {"bob": TenantLimits(requests_per_minute=1)})
    gate = Gate(tenants, ByteBudget(0))
    gate.admit("bob", None, 0.0)
    tenants.replace([], {"bob": TenantLimits(requests_per_minute=2)})
    with pytest.raises(RateLimited):
        gate.admit("bob", None, 0.0)
    gate.admit("bob", None, 30.0)


def test_running_requests_count_under_a_lower_limit():
    tenants = Tenants([], {"alice": TenantLimits(concurrent_requests=2)})
    gate = Gate(tenants, ByteBudget(0))
    first, second = (gate.admit("alice", None, 0.0) for _ in range(2))
    tenants.replace([], {"alice": TenantLimits(concurrent_requests=1, tokens_per_minute=9)})
    first.close()
    with pytest.raises(RateLimited, match="concurrent_requests = 1"):
        gate.admit("alice", None, 0.0)
    second.close()
    gate.admit("alice", None, 0.0)


class TestBodies:
    def test_bytes_are_held_until_the_body_is_freed(self):
        gate = gate_with(100)
        with gate.admit(None, None, 0.0) as first, gate.admit(None, None, 0.0) as second:
            first.hold(40)
            first.hold(70)
            with pytest.raises(NoMemory) as refused:
                second.hold(31)
            assert refused.value.headers == {"retry-after": "1"}
            assert gate.bodies.used == 70
            first.free_body()
            second.hold(100)
        assert gate.bodies.used == 0

    def test_a_body_that_cannot_fit_is_refused_by_its_length_and_not_counted(self):
        gate = gate_with(100, requests_per_minute=1)
        with pytest.raises(NoMemory):
            gate.admit("alice", 101, 0.0)
        with gate.admit("alice", 100, 0.0):
            assert gate.bodies.used == 0  # nothing of it has arrived


class TestParts:
    def test_each_part_that_runs_counts_and_the_whole_for_the_first_one(self):
        gate = gate_with(concurrent_requests=3, requests_per_minute=1)
        with gate.admit("alice", None, 0.0) as whole:
            assert running(gate) == 1
            parts = [whole.part(10) for _ in range(3)]
            assert (running(gate), gate.bodies.used, whole.has_room()) == (3, 30, False)
            assert [part.since for part in parts] == [whole.since] * 3
            for _ in range(2):  # it counts once
                parts[0].close()
                assert (running(gate), gate.bodies.used, whole.has_room()) == (2, 20, True)
        assert (running(gate), gate.bodies.used) == (0, 0)  # also of parts that nobody closed

    def test_one_part_may_always_run(self):
        gate = gate_with(100, concurrent_requests=1)
        with gate.admit("alice", None, 0.0) as whole:
            whole.hold(100)
            assert whole.has_room(100)
            with whole.part(100):
                assert not whole.has_room()
                assert running(gate) == 1

    def test_no_further_part_begins_without_memory_for_its_body(self):
        gate = gate_with(100)
        with gate.admit(None, None, 0.0) as whole, whole.part(60):
            assert whole.has_room(40)
            assert not whole.has_room(41)

    def test_a_prompt_is_paid_once(self):
        gate = gate_with(tokens_per_minute=60)
        quota = gate._tenants.quota("alice")
        with gate.admit("alice", None, 0.0) as whole:
            with whole.part() as part:
                part.spend_prompt(7)
                part.spend_prompt(7)
            with whole.part() as part:
                part.spend_prompt(7)
            assert quota.take().tokens == 14
            whole.prompt_is_paid = True
            with whole.part() as part:
                part.spend_prompt(7)
                part.spend(1)
            assert quota.take().tokens == 1


class TestMemoryOfTenants:
    def gate(self, longest=0):
        keys = [ApiKey.of(f"sk-{name}", name) for name in ("alice", "bob")]
        return Gate(Tenants(keys, {}), ByteBudget(100), longest)

    def test_one_of_several_has_half(self):
        gate = self.gate()
        with gate.admit("alice", 50, 0.0) as first, gate.admit("alice", None, 0.0) as second:
            first.hold(50)
            with pytest.raises(NoMemory, match="the half that one of several tenants may have"):
                second.hold(1)
            with pytest.raises(NoMemory):
                gate.admit("alice", 1, 0.0)
            with gate.admit("bob", 50, 0.0) as third:
                third.hold(50)
                assert gate.bodies.used == 100
            first.free_body()
            second.hold(50)
        assert gate.bodies.used == 0

    def test_the_longest_body_fits(self):
        with self.gate(80).admit("alice", 80, 0.0) as admitted:
            admitted.hold(80)

    def test_new_limits_count_while_a_tenant_has_requests(self):
        gate = self.gate()
        with gate.admit("alice", None, 0.0), pytest.raises(NoMemory):
            gate.admit("alice", 51, 0.0)
        with gate.admit("alice", None, 0.0) as first:
            first.hold(40)
            gate.longest = 80
            gate.admit("alice", 40, 0.0).close()
            gate.longest, gate.bodies.limit = 0, 60
            with pytest.raises(NoMemory):
                gate.admit("alice", 1, 0.0)

    def test_a_tenant_without_requests_costs_nothing(self):
        gate = self.gate()
        gate.admit("alice", 50, 0.0).close()
        assert not gate._by_tenant


def call(body=b"{}", **headers):
    given = Headers.of([(name.replace("_", "-"), value) for name, value in headers.items()])
    content = JsonBody(body) if isinstance(body, bytes) else body
    return Call("r", "POST", "/v1/chat/completions", given, content)


@pytest.mark.parametrize(
    ("body", "header", "priority"),
    [
        (b"{}", None, 0),
        (b'{"priority":3}', None, 3),
        (b'{"priority":-99}', None, -8),
        (b'{"priority":true,"service_tier":"flex"}', None, 1),
        (b'{"service_tier":"priority"}', None, -1),
        (b'{"service_tier":"default"}', None, 0),
        (b'{"service_tier":1,"priority":"x"}', None, 0),
        (b'{"priority":3}', "-2", -2),
        (None, None, 0),
    ],
)
def test_the_priority(body, header, priority):
    headers = {"x_kvpin_priority": header} if header is not None else {}
    assert priority_of(call(body, **headers)) == priority


@pytest.mark.parametrize("given", ["high", "", "1.5", "9", "-9", "99"])
def test_a_wrong_priority_is_refused(given):
    with pytest.raises(BadRequest, match="x-kvpin-priority must be a whole number from -8 to 8"):
        priority_of(call(x_kvpin_priority=given))


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"x_stainless_timeout": "NOT_GIVEN"}, None),
        ({"x_stainless_timeout": "0"}, None),
        ({"x_stainless_timeout": "600"}, 600),
        ({"x_stainless_read_timeout": "5.5"}, 5.5),
        ({"x_request_timeout": "7", "x_stainless_timeout": "600"}, 7),
    ],
)
def test_how_long_the_client_waits(headers, seconds):
    assert deadline_of(call(**headers)) == seconds


@pytest.mark.parametrize(
    ("body", "known", "tokens"),
    [
        (b'{"max_tokens":10}', 100, 110),
        (b'{"max_completion_tokens":10,"max_tokens":20}', 100, 110),
        (b'{"max_tokens":100000}', 100, 100 + MOST_ANSWER),
        (b'{"max_tokens":"many"}', 100, 100 + USUAL_ANSWER),
        (b'{"prompt":"' + b"x" * 388 + b'"}', None, 100 + USUAL_ANSWER),
        (None, None, USUAL_ANSWER),
    ],
)
def test_the_tokens(body, known, tokens):
    assert tokens_of(call(body), known) == tokens
