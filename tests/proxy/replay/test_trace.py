import gzip
import json
from dataclasses import replace

import pytest

from proxy.replay import trace as module
from proxy.replay.trace import (
    RecordedEngine,
    TraceError,
    answer_blocks,
    figures_of,
    read_trace,
)
from tests.proxy.replay.making import ask, model_of, play

LINE = {"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [5, 6, 7]}


def write(path, *lines):
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_a_request_is_its_full_blocks(tmp_path):
    trace = read_trace(write(tmp_path / "t.jsonl", LINE))
    (request,) = trace.requests
    assert (request.at, request.chain.hashes) == (1.5, (5, 6))
    assert (request.n_tokens, request.output_tokens) == (1100, 7)
    assert (trace.name, trace.tokens_per_block) == ("t.jsonl", 512)
    assert (trace.n_tokens, trace.has_sessions) == (1100, False)


def test_a_recording_of_kvpin(tmp_path):
    line = {**LINE, "hash_ids": [2**64 - 1], "input_length": 17, "block_tokens": 16, "session_id": 3}
    trace = read_trace(write(tmp_path / "t.jsonl", line))
    assert trace.requests[0].chain.hashes == (2**64 - 1,)
    assert (trace.tokens_per_block, trace.requests[0].session, trace.has_sessions) == (16, "3", True)


def test_a_recording_tells_the_blocks_of_answers_and_another_trace_does_not(tmp_path):
    first = {"timestamp": 1, "input_length": 20, "output_length": 60, "hash_ids": [1, 2], "block_tokens": 16}
    turns = [first, first | {"timestamp": 2, "input_length": 90, "hash_ids": [1, 3, 4, 5, 6]}]
    about = {"recording": {"began": 1.0, "key": "k"}}
    for lines, answer in (([about, *turns], (3, 4, 5)), (turns, ())):
        path = write(tmp_path / "trace.jsonl", *(json.dumps(line, separators=(",", ":")) for line in lines))
        assert [each.answer for each in read_trace(path).requests] == [answer, ()]


def test_the_engines_that_a_recording_names(tmp_path):
    served = [("a", 200), ("b", 200), ("a", 200), ("dead", 500), (None, 200)]
    lines = [{**LINE, "engine": engine, "status": status, "model": "m"} for engine, status in served]
    path = write(tmp_path / "t.jsonl", *lines, {**LINE, "engine": "c", "model": "other"})
    assert read_trace(path, model="m").engines == 2
    assert read_trace(write(tmp_path / "u.jsonl", LINE)).engines == 0


def test_requests_are_in_the_order_of_their_arrival(tmp_path):
    lines = [{**LINE, "timestamp": at, "output_length": at} for at in (30, 10, 20, 10)]
    requests = read_trace(write(tmp_path / "t.jsonl", *lines)).requests
    assert [request.id for request in requests] == [0, 1, 2, 3]
    assert [request.output_tokens for request in requests] == [10, 10, 20, 30]


def test_ids_that_are_not_chained_are_chained(tmp_path):
    lines = [{**LINE, "hash_ids": ids} for ids in ([1, 2], [3, 2], [1, 2])]
    trace = read_trace(write(tmp_path / "t.jsonl", *lines))
    first, second, third = (request.chain.hashes for request in trace.requests)
    assert trace.rechained
    assert first == third
    assert not set(first) & set(second)


def test_what_all_requests_share(tmp_path):
    lines = [{**LINE, "hash_ids": ids} for ids in ([1, 2], [1, 3], [1, 2])]
    assert read_trace(write(tmp_path / "t.jsonl", *lines)).common_blocks == 1
    assert read_trace(write(tmp_path / "u.jsonl", lines[0])).common_blocks == 2


def test_what_failed_is_left_out_and_counted(tmp_path):
    statuses = (200, 429, None, 503, 400, 499)
    lines = [{**LINE, "output_length": n, "status": status} for n, status in enumerate(statuses)]
    trace = read_trace(write(tmp_path / "t.jsonl", *lines))
    assert [request.output_tokens for request in trace.requests] == [0, 2, 5]
    assert (trace.failed, read_trace(write(tmp_path / "u.jsonl", LINE)).failed) == (3, 0)
    with pytest.raises(TraceError, match=r"u\.jsonl: holds no request that did not fail$"):
        read_trace(write(tmp_path / "u.jsonl", lines[1]))


def test_one_model_is_replayed_and_the_others_are_named(tmp_path):
    models = ("big", "small", "big", None)
    lines = [{**LINE, "output_length": n, "model": model} for n, model in enumerate(models)]
    path = write(tmp_path / "t.jsonl", *lines)
    with pytest.raises(TraceError, match=r"requests of big and small; choose one: --model-name big$"):
        read_trace(path)
    for model, outputs in (("big", [0, 2]), ("small", [1])):
        assert [request.output_tokens for request in read_trace(path, model=model).requests] == outputs
    with pytest.raises(TraceError, match=r"no request of the model 'other'; there are big and small$"):
        read_trace(path, model="other")
    with pytest.raises(TraceError, match=r"its lines name no model$"):
        read_trace(write(tmp_path / "u.jsonl", LINE), model="big")
    failed = {**LINE, "model": "typo", "status": 404}  # a model that only failed is none to choose
    assert len(read_trace(write(tmp_path / "u.jsonl", lines[0], lines[3], failed)).requests) == 2


def test_a_last_line_that_breaks_off_is_passed_over(tmp_path):
    whole = json.dumps(LINE)
    for at in (1, 30, len(whole) - 1):
        path = tmp_path / "t.jsonl"
        path.write_text(f"{whole}\n{whole[:at]}")
        trace = read_trace(path)
        assert (len(trace.requests), trace.cut) == (1, True)
    path.write_text(f"{whole}\n{whole}")
    assert (len(read_trace(path).requests), read_trace(path).cut) == (2, False)
    path.write_text(f"{whole[:30]}\n{whole}\n")
    with pytest.raises(TraceError, match="line 1: JSON is malformed"):
        read_trace(path)
    path.write_text(f'{whole}\n{{"timestamp": 1}}')
    with pytest.raises(TraceError, match="line 2: Object missing required field"):
        read_trace(path)
    about = {"began": 1, "key": "k", "engines": [{"id": "e", "prefill": [[64, 0]]}]}
    path.write_text(json.dumps({"recording": about}) + "\n")
    with pytest.raises(TraceError, match="line 1: Expected `float` > 0"):
        read_trace(path)
    path.write_text(whole[:30])
    with pytest.raises(TraceError, match=r"holds no request$"):
        read_trace(path)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([LINE, "{"], "t.jsonl, line 2: Input data was truncated"),
        ([LINE, "", {**LINE, "input_length": "x"}], "line 3: Expected `int`, got `str` - at"),
        ([{**LINE, "timestamp": -1}], "line 1: Expected `float` >= 0"),
        ([{**LINE, "hash_ids": [2**64, 2]}], "line 1: "),
        ([{**LINE, "hash_ids": [1]}], "line 1: 1 hash_ids for 2 full blocks of 512 tokens"),
        ([{"timestamp": 1}], "line 1: Object missing required field `input_length`"),
        ([LINE, {**LINE, "block_tokens": 16, "hash_ids": list(range(68))}], "blocks of 16 and 512 tokens"),
        ([""], "holds no request"),
    ],
)
def test_a_bad_trace_is_told_by_its_line(tmp_path, lines, message):
    with pytest.raises(TraceError) as told:
        read_trace(write(tmp_path / "t.jsonl", *lines))
    assert message in str(told.value)
    assert "\n" not in str(told.value)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none")
    whole = gzip.compress(json.dumps(LINE).encode() * 100)
    for name, content in (("cut", whole[:-20]), ("plain", b"{}"), ("broken", whole[:15] + b"x" * 40)):
        (tmp_path / f"{name}.gz").write_bytes(content)
        with pytest.raises(TraceError, match=rf"{name}\.gz"):
            read_trace(tmp_path / f"{name}.gz")


PACKED = b'{"timestamp":1,"input_length":1,"output_length":1,"hash_ids":[]}\n'


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (PACKED * (1 << 16), "line [0-9]+: the file unpacks to more than 200 times its size"),
        (b" " * (2 << 20), "line 1: is longer than 1 MiB"),
    ],
)
def test_a_file_that_unpacks_to_much_more_than_recordings_do_is_refused(tmp_path, monkeypatch, lines, said):
    monkeypatch.setattr(module, "_MOST_LINE", 1 << 20)
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(lines))
    with pytest.raises(TraceError, match=said):
        read_trace(path)


@pytest.mark.parametrize("session", ["s", None])
@pytest.mark.parametrize(("output", "answer"), [(50, ()), (51, (3,)), (151, (3, 4)), (900, (3, 4, 5, 6))])
def test_the_next_turn_tells_what_an_answer_has_completed(session, output, answer):
    """Blocks of 100 tokens: the prompt leaves 50 of the third one free."""
    turns = [
        ask((1, 2), output=output, session=session, name=0),
        ask((9,), session="other" if session else None, name=1),
        ask((1, 2, 3, 4, 5, 6), session=session, name=2),
    ]
    assert answer_blocks(turns) == [answer, (), ()]


def test_an_answer_is_kept_for_the_next_turn_evicts_the_oldest_and_is_dropped_where_there_is_no_room():
    first = replace(ask((1, 2), output=151, name=1), answer=(3, 4))
    engine, diary = play(model_of(), first, ask((1, 2, 3, 4, 5), at=5.0, name=2))
    assert diary.of("started")[1] == ("started", 5.0, 2, 400, 0)
    assert engine.evicted == 0
    engine, diary = play(model_of(4), ask((7,), name=1), replace(ask((1, 2), at=2.0, name=2), answer=(3, 4)))
    assert diary.of("removed")[-1] == ("removed", "gpu", [7])
    assert (engine.evicted, engine.cache.held) == (1, 4)
    _, diary = play(model_of(4), replace(ask((1, 2), name=1), answer=(3, 4, 5)))
    assert ("stored", "gpu", [3, 4, 5]) not in diary.lines


def engine(name, tok_s=1000, **figures):
    return RecordedEngine(name, prefill=((1024.0, 1024 / tok_s),), **figures)


def test_the_median_engine_stands_for_all():
    known = [
        engine("a", 1000, gpu_tokens=100, host_tokens=50, interference=0.1, token_s=0.02),
        engine("b", 1100, gpu_tokens=300, interference=0.3, restore_tok_s=9.0),
        engine("c", 1050, gpu_tokens=200, interference=0.2),
        RecordedEngine("unused"),
    ]
    median = engine("median", 1050, gpu_tokens=200, host_tokens=50, interference=0.2)
    median.restore_tok_s, median.token_s = 9.0, 0.02
    assert figures_of(known) == (median, "")


def test_of_an_engine_that_several_kvpins_recorded_the_best_known_counts():
    told = [engine("a", 10, samples=1), engine("a", 1000, samples=90), engine("a", 500, samples=2)]
    figures, differ = figures_of(told)
    assert (figures.prefill, differ) == (((1024.0, 1.024),), "")


def test_engines_of_other_speeds_are_told():
    _, differ = figures_of([engine("a", 1000), engine("b", 2000)])
    assert differ.startswith("the recorded engines differ: they compute 1,000 to 2,000 prompt tokens/s")
