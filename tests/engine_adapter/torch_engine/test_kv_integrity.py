"""Any order of operations leaves the cache intact: no block lost, no wrong KV read, no event missing."""

from __future__ import annotations

import math
from array import array

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_adapter.torch_engine.requests import RequestRefused
from engine_adapter.types import KvTarget
from tests.engine_adapter.torch_engine.kv_world import SIZE, World

PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=18)
SALTS = st.sampled_from([None, None, "a", "b"])
KEEPS = st.just({}) | st.fixed_dictionaries(
    {
        "priority": st.sampled_from([0, 1, 5]),
        "ttl_s": st.sampled_from([1.0, 5.0, math.inf]),
        "owner": st.sampled_from([None, "x", "y"]),
    }
)
SPARSE = st.sampled_from([None, None, 1, 2])


def target_of(tokens, extra, salt):
    return KvTarget(array("i", tokens), extras_of(tokens, extra), salt)


def extras_of(tokens, extra):
    """Extra ids that make each token 2 a fake one."""
    return None if extra is None else array("Q", [extra if token == 2 else 0 for token in tokens])


class CacheMachine(RuleBasedStateMachine):
    @initialize(gpu=st.integers(2, 9), host=st.sampled_from([0, 1, 3, 12]))
    def start(self, gpu, host):
        self.world = World(gpu, host)
        self.pins = []
        self.now = 0.0

    @rule(tokens=PROMPTS, extra=SPARSE, salt=SALTS, keep=KEEPS, spare=st.integers(0, 2))
    def begin(self, tokens, extra, salt, keep, spare):
        sequence = self.world.sequence(tokens, extras_of(tokens, extra), salt, **keep)
        if self.world.begin(sequence, spare):
            assert len(sequence.path) <= (len(tokens) - 1) // SIZE
            assert sequence.computed < len(tokens)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), extend=st.booleans())
    def prefill(self, data, extend):
        sequence = data.draw(st.sampled_from(self.world.running))
        if extend:
            self.world.cache.extend(sequence)
        left = len(sequence.tokens) - sequence.computed
        if left:
            self.world.compute(sequence, data.draw(st.integers(1, left)))

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), token=st.integers(0, 2))
    def decode(self, data, token):
        sequence = data.draw(st.sampled_from(self.world.running))
        if sequence.computed == len(sequence.tokens):
            if self.world.cache.reserve(sequence, len(sequence.tokens) + 1):
                sequence.append(token)
                self.world.compute(sequence, 1)
            else:
                self.world.end(sequence)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def end(self, data):
        self.world.end(data.draw(st.sampled_from(self.world.running)))

    @rule(tokens=PROMPTS, extra=SPARSE, salt=SALTS, ttl=st.sampled_from([1.0, 5.0]))
    def pin(self, tokens, extra, salt, ttl):
        try:
            pinned = self.world.cache.pin(target_of(tokens, extra, salt), ttl, self.now)
        except RequestRefused:
            return
        self.pins.append(pinned.pin_id)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        self.world.cache.unpin(data.draw(st.sampled_from(self.pins)))

    @rule(seconds=st.sampled_from([1.0, 4.0]))
    def expire(self, seconds):
        self.now += seconds
        self.world.cache.expire(self.now)

    @rule(
        verb=st.sampled_from(["flush", "offload", "restore"]),
        tokens=st.none() | PROMPTS,
        extra=SPARSE,
        salt=SALTS,
        limit=st.integers(1, 6),
    )
    def operate(self, verb, tokens, extra, salt, limit):
        target = KvTarget(cache_salt=salt) if tokens is None else target_of(tokens, extra, salt)
        result = getattr(self.world.cache, verb)(target, limit)
        assert 0 <= result.moved <= limit
        assert result.remaining >= 0
        assert min(result.left.values()) >= 0
        assert result.moved or not result.remaining  # so that repeating the call comes to an end

    @invariant()
    def whole(self):
        if hasattr(self, "world"):
            self.world.check()


TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
