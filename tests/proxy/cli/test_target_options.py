import io
import json

import pytest
import typer

from proxy.cli.arguments import TargetOptions

MESSAGES = [{"role": "user", "content": "zażółć"}]


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "file"
        path.write_bytes(content.encode())
        return str(path)

    return write


def test_what_of_a_request_belongs_to_its_prompt(file):
    request = {"messages": MESSAGES, "tools": [], "model": "m", "temperature": 0, "stream": True}
    body = TargetOptions(messages_file=file("\ufeff" + json.dumps(request))).body()
    assert body == {"messages": MESSAGES, "tools": [], "model": "m"}


def test_a_flag_wins_over_the_file(file):
    request = file(json.dumps({"messages": MESSAGES, "tools": None, "model": "a", "cache_salt": "of a"}))
    options = TargetOptions(messages_file=request, model="b")
    assert options.body() == {"messages": MESSAGES, "model": "b", "cache_salt": "of a"}


@pytest.mark.parametrize("text", ["a\nb\n", "a\r\nb\rc"])
def test_text_from_a_file_or_standard_input_keeps_its_line_ends(file, monkeypatch, text):
    assert TargetOptions(prompt_file=file(text)).body() == {"prompt": text}
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert TargetOptions(prompt_file="-").body() == {"prompt": text}


def test_bytes_that_are_no_text(tmp_path, capsys):
    (tmp_path / "f").write_bytes(b"\xff\xfe")
    with pytest.raises(typer.Exit):
        TargetOptions(prompt_file=str(tmp_path / "f")).body()
    assert "is not UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{", "[" * 100_000])
def test_a_file_that_is_no_json(file, capsys, content):
    with pytest.raises(typer.Exit):
        TargetOptions(messages_file=file(content)).body()
    assert "--messages-file" in capsys.readouterr().err
