import pytest

from proxy.replay.trace import read_trace


@pytest.fixture
def mix(script):
    return script.Mix(
        "a few",
        chats=4,
        system_prompts=2,
        questions=6,
        kv_tokens=1000,
        question_tokens=(5, 9),
        answer_tokens=(3, 6),
        documents=2,
        document_tokens=(30, 60),
        requests_per_s=1.0,
    )


def test_a_seed_is_a_workload(script, mix):
    bodies = [
        [(question.at, question.body) for question in script.make_work(mix, seed)] for seed in (1, 1, 2)
    ]
    assert bodies[0] == bodies[1] != bodies[2]


def test_a_turn_continues_all_that_was_said_before(script, mix):
    said: dict[str, list[int]] = {}
    turns = [question for question in script.make_work(mix, 3) if question.session.startswith("chat")]
    assert len(turns) == 4 * script.TURNS
    for turn in turns:
        before = said.get(turn.session, [])
        assert list(turn.token_ids[: len(before)]) == before
        said[turn.session] = [*turn.token_ids, *turn.answer]


def test_an_answer_follows_from_the_whole_prompt(script):
    prompt = list(range(100, 200))
    assert script.answer_ids(prompt, 5) == script.answer_ids(tuple(prompt), 5)
    assert script.answer_ids(prompt, 5) != script.answer_ids([7, *prompt], 5)
    assert script.answer_ids(prompt, 5) != script.answer_ids([*prompt, 7], 5)
    assert len(script.answer_ids(prompt, 5)) == 5


def test_replay_reads_the_trace(script, mix, tmp_path):
    made = script.make_work(mix, 5)
    script.write_trace(made, tmp_path / "work.jsonl")
    trace = read_trace(tmp_path / "work.jsonl")
    assert (trace.tokens_per_block, trace.rechained, len(trace.requests)) == (16, False, len(made))
    assert trace.n_tokens == sum(len(question.token_ids) for question in made)
    assert [request.session for request in trace.requests] == [question.session for question in made]
    asked = [request.chain.hashes for request in trace.requests if request.session == "document-0"]
    assert len({hashes[0] for hashes in asked}) == 1 < len(asked)
