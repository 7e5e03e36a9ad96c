from __future__ import annotations

from array import array

import pytest
import torch

from engine_adapter.torch_engine.attention import KvStorage
from engine_adapter.torch_engine.kv_cache import KvSequence
from engine_adapter.torch_engine.runner import Runner
from tests.engine_adapter.torch_engine.engine_world import tiny

SIZE = 4


@pytest.fixture
def runner():
    torch.set_num_threads(1)
    model = tiny()
    storage = KvStorage(
        model.layers,
        gpu_blocks=16,
        host_blocks=0,
        tokens_per_block=SIZE,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    return Runner(model, storage, SIZE)


def sequence(tokens, blocks, extra_ids=None, embeddings=None):
    extras = None if extra_ids is None else array("Q", extra_ids)
    made = KvSequence(array("i", tokens), extras, None, embeddings=embeddings or {})
    made.blocks = array("i", blocks)
    return made


def planned(item, count, logits=1):
    item.count, item.logits = count, logits
    return item


def run(runner, *work):
    logits = runner.run([planned(*each) for each in work])
    for item, count, _ in work:
        item.computed += count
    return logits


def test_logits_after_several_tokens_of_an_item(runner):
    whole = run(runner, (sequence(range(6), [0, 1]), 6, 6))
    last = run(runner, (sequence(range(40, 44), [2]), 4, 0), (sequence(range(6), [4, 9]), 6, 3))
    torch.testing.assert_close(last, whole[3:])


def test_decodes_of_similar_lengths_are_attended_together(runner):
    long, short = sequence(range(32), list(range(8))), sequence([5], [9])
    third = sequence([6], [10])
    run(runner, (long, 31, 0))
    work = [planned(item, 1) for item in (short, third, long)]
    assert runner._groups(runner._rows(work)) == [(0, 2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine_adapter.torch_engine.runner.PADDING_TOKENS", 4 * SIZE)
        assert runner._groups(runner._rows(work)) == [(0, 1), (2, 2)]
    together = run(runner, (short, 1, 1), (third, 1, 1), (long, 1, 1))
    long.computed = 31
    torch.testing.assert_close(together[2:], run(runner, (long, 1, 1)))


def test_a_call_gathers_no_more_than_the_cpus_own_cache_holds(runner):
    work = [planned(sequence([index], [index]), 1) for index in range(5)]
    runner._most_blocks = 2
    assert runner._groups(runner._rows(work)) == [(0, 1), (2, 3), (4, 4)]


def test_runs_of_different_tables_in_one_chunk(runner):
    tables = {7: torch.randn(3, 256), 9: torch.randn(3, 256)}
    fake = 4096
    tokens, extras = [fake + 2, fake, fake + 1, 5, fake + 1], [7, 7, 9, 0, 9]
    mixed = sequence(tokens, [0, 1], extras, tables)
    embed = tiny().module.get_input_embeddings()
    rows = torch.stack([tables[7][2], tables[7][0], tables[9][1], embed.weight[5], tables[9][1]])
    logits = runner.run([planned(mixed, 5)])
    whole = sequence([fake + index for index in range(5)], [2, 3], [1] * 5, {1: rows})
    torch.testing.assert_close(logits, runner.run([planned(whole, 5)]))
