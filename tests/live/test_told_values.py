"""The rules `agents` on a real llama-server: a new directory reuses the prompt, and paths come back right."""

import json

import pytest

from tests.live.llama_world import llama_world

pytestmark = pytest.mark.live

# In pieces: where a request holds a reference itself, no value is replaced.
REPEATS = r'root ::= "In [" "[path 1]]/a.py, said [" "[date 1]]."'
"""A model that repeats references, whatever it has read."""
RULES = "Be brief. Read a file before you change it. " * 60


def asked(path, *more, **fields):
    system = f"1. Date: 11/29/2026\n2. Working Directory: {path}\n{RULES}"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hi"}, *more]
    return {"messages": messages, "max_tokens": 64, "temperature": 0, **fields}


def said(answer):
    if not answer.text.startswith("data:"):
        return answer.json()["choices"][0]["message"]["content"]
    events = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
    return "".join(each["choices"][0]["delta"].get("content") or "" for each in events if each["choices"])


def test_a_new_directory_reuses_the_prompt_and_gets_its_own_path(tmp_path):
    with llama_world(tmp_path, slots=1, kvpin_flags=("--normalise", "agents")) as world:
        world.until_known()
        for path in ("/home/me/x", "/home/me/y"):
            for streams in (False, True):
                answer = world.post("chat/completions", asked(path, grammar=REPEATS, stream=streams))
                assert answer.headers["x-kvpin-normalised"] == "paths,dates"
                assert said(answer) == f"In {path}/a.py, said 11/29/2026."
        first, n_before = world.post("chat/completions", asked("/home/me/z")).json()["usage"], 0
        assert first["prompt_tokens_details"]["cached_tokens"] > 0.95 * first["prompt_tokens"]
        talk = []
        for at in range(6):  # the session's own history stays cached
            usage = world.post("chat/completions", asked("/home/me/z", *talk)).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= n_before - 1
            n_before = usage["prompt_tokens"]
            talk += [{"role": "assistant", "content": f"Tide {at}."}, {"role": "user", "content": "And?"}]
