"""A KV cache with readable memory: each slot shows what a real engine would have written."""

from __future__ import annotations

from array import array

from engine_adapter.torch_engine.kv_cache import KvCache, KvSequence
from engine_adapter.torch_engine.kv_tree import KvTree
from engine_adapter.types import BlocksRemoved, BlocksStored, KvTarget, Retention, Tier
from tests.engine_adapter.torch_engine.kv_integrity import violations

SIZE = 4


class Memory:
    """Both tiers. A slot lists what the KV of each token depends on: the salt and all tokens up to it."""

    def __init__(self, gpu_blocks, host_blocks):
        self.gpu = [[None] * SIZE for _ in range(gpu_blocks)]
        self.host = [[None] * SIZE for _ in range(host_blocks)]

    def copy_to_host(self, gpu_slots, host_slots):
        assert len(set(host_slots)) == len(host_slots) == len(gpu_slots)
        copies = [list(self.gpu[slot]) for slot in gpu_slots]
        for slot, block in zip(host_slots, copies, strict=True):
            self.host[slot] = block

    def copy_to_gpu(self, host_slots, gpu_slots):
        assert len(set(gpu_slots)) == len(gpu_slots) == len(host_slots)
        copies = [list(self.host[slot]) for slot in host_slots]
        for slot, block in zip(gpu_slots, copies, strict=True):
            self.gpu[slot] = block


class View:
    """The knowledge of a listener: per tier, name → (parent name, salt at the root, tokens, extra ids)."""

    def __init__(self):
        self.tiers = {Tier.GPU: {}, Tier.HOST: {}}

    def apply(self, events):
        for event in events:
            known = self.tiers[event.tier]
            if isinstance(event, BlocksRemoved):
                for name in event.hashes:
                    del known[name]
                continue
            assert isinstance(event, BlocksStored)
            assert event.parent is None or any(event.parent in tier for tier in self.tiers.values())
            parent, size = event.parent, event.tokens_per_block
            for index, name in enumerate(event.hashes):
                cut = slice(index * size, (index + 1) * size)
                extras = None if event.extra_ids is None else tuple(event.extra_ids[cut])
                content = tuple(event.token_ids[cut]), extras if extras and any(extras) else None
                assert name not in known
                known[name] = (parent, event.salt if parent is None else None, *content)
                parent = name


class World:
    """A cache, its memory and a listener. `run` computes like an engine and checks all it reads."""

    def __init__(self, gpu_blocks=8, host_blocks=0):
        self.memory = Memory(gpu_blocks, host_blocks)
        tree = KvTree(
            gpu_blocks=gpu_blocks, host_blocks=host_blocks, tokens_per_block=SIZE, copier=self.memory
        )
        self.cache = KvCache(tree, block_bytes=100, pin_share=0.8)
        self.view = View()
        self.running = []

    def sequence(self, tokens, extra_ids=None, salt=None, **keep):
        extras = None if extra_ids is None else array("Q", extra_ids)
        return KvSequence(array("i", tokens), extras, salt, Retention(**keep))

    def begin(self, sequence, spare=0):
        if not self.cache.begin(sequence, spare=spare):
            return False
        self.running.append(sequence)
        return True

    def compute(self, sequence, count):
        """Checks the KV of all tokens so far, then writes that of the next ones."""
        assert self.cache.reserve(sequence, sequence.computed + count)
        for position in range(sequence.computed):
            assert self._cell(sequence, position) == self._meaning(sequence, position)
        for position in range(sequence.computed, sequence.computed + count):
            self.memory.gpu[sequence.blocks[position // SIZE]][position % SIZE] = self._meaning(
                sequence, position
            )
        self.cache.advance(sequence, count)

    def end(self, sequence):
        self.cache.end(sequence)
        if sequence in self.running:
            self.running.remove(sequence)

    def run(self, tokens, **kwargs):
        """A whole request; returns the tokens it reused in full blocks."""
        sequence = self.sequence(tokens, **kwargs)
        assert self.begin(sequence)
        reused = len(sequence.path) * SIZE
        self.compute(sequence, len(sequence.tokens) - sequence.computed)
        self.end(sequence)
        self.check()
        return reused

    def check(self):
        assert violations(self.cache, self.running) == []
        self.view.apply(self.cache.tree.journal.drain())
        fresh = View()
        fresh.apply(self.cache.snapshot())
        assert fresh.tiers == self.view.tiers

    def held(self, tokens):
        """Number of cached blocks of a prefix. Changes nothing."""
        return len(self.cache._scope(KvTarget(array("i", tokens))))

    def blocks(self, tier):
        return len(self.view.tiers[tier])

    def _cell(self, sequence, position):
        return self.memory.gpu[sequence.blocks[position // SIZE]][position % SIZE]

    def _meaning(self, sequence, position):
        extras = None if sequence.extra_ids is None else tuple(sequence.extra_ids[: position + 1])
        if extras is not None and not any(extras):
            extras = None
        return sequence.salt, tuple(sequence.tokens[: position + 1]), extras
