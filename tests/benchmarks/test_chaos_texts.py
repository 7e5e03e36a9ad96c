"""The texts of the mock engines of `chaos.py`."""

import pytest

PROMPTS = [[1, 2, number] for number in range(300)]


@pytest.fixture
def texts(monkeypatch):
    import chaos_texts

    monkeypatch.setattr(chaos_texts, "_known", [f" {letter}{letter}" for letter in "abcdefgh"])
    return chaos_texts


def test_most_prompts_get_other_texts_from_other_engines_after_the_same_beginning(texts):
    differ = same_beginning = 0
    for prompt in PROMPTS:
        told = [texts.told(prompt, 16, engine).text for engine in range(3)]
        differ += len(set(told)) > 1
        same_beginning += len(set(told)) > 1 and len({text[0] for text in told}) == 1
    assert differ > 150
    assert same_beginning > 120
    assert any("[DONE]" in texts.told(prompt, 16, 0).text for prompt in PROMPTS)


def test_a_stream_that_just_stops_is_a_beginning_without_an_end(texts):
    stoppers = [(prompt, texts.stopper(prompt, 16)) for prompt in PROMPTS]
    found = [(prompt, engine) for prompt, engine in stoppers if engine is not None]
    assert found
    for prompt, engine in found:
        stream, whole = texts.streamed(prompt, 16, engine), texts.told(prompt, 16, engine)
        assert (stream.finish, whole.finish is None) == (None, False)
        assert whole.text.startswith(stream.text)
        assert texts.streamed(prompt, 16, engine + 1) == texts.told(prompt, 16, engine + 1)
