"""Letters that llama.cpp does not know; test_gguf_tokenizer.py compares all characters with a real server."""

import pytest

from engine_adapter.prompt.llama_cpp_letters import _NEW, has_new, old_classes, plain_classes


def test_classes_come_back():
    pattern = r"[^\r\n\p{L}]?[\p{L}\p{M}]+|\p{N}"
    assert old_classes(pattern) != pattern
    doubled = old_classes(pattern).replace("\\", "\\\\")
    assert plain_classes(f'"{doubled}"').replace("\\\\", "\\") == f'"{pattern}"'


@pytest.mark.parametrize("text", ["", "plain", "zażółć 漢字 한국어 हिन्दी 🙂 𝐛 \ud83d", "\u0301\u2003"])
def test_texts_of_usual_letters(text):
    assert not has_new(text)


def test_each_new_letter_is_found():
    ends = _NEW.replace("-", "")
    assert all(has_new(f"a漢{letter}b") for letter in ends)
