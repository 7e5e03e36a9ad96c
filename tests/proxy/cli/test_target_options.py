import io
import json

import pytest
import typer

from proxy.cli.arguments import PrefixOptions, RequestOptions, TargetOptions

MESSAGES = [{"role": "user", "content": "zażółć"}]


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "file"
        path.write_text(content, encoding="utf-8")
        return str(path)

    return write


def test_what_of_a_request_belongs_to_its_prompt(file):
    request = {"messages": MESSAGES, "tools": [], "model": "m", "temperature": 0, "stream": True}
    body = TargetOptions(messages_file=file(json.dumps(request))).body()
    assert body == {"messages": MESSAGES, "tools": [], "model": "m"}


def test_text_from_a_file_or_standard_input(file, monkeypatch):
    assert TargetOptions(prompt_file=file("a\nb\n")).body() == {"prompt": "a\nb\n"}
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert TargetOptions(prompt_file="-").body() == {"prompt": "from a pipe"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (RequestOptions(), "this command needs a prefix: use one of --messages-file, --prompt, "),
        (PrefixOptions(engine="e"), "--token-ids, --prompt-cache-key\n"),
    ],
)
def test_a_prompt_or_a_prefix_must_be_named(capsys, options, said):
    with pytest.raises(typer.Exit):
        options.body()
    error = capsys.readouterr().err
    assert said in error
    assert ("--prompt-cache-key" in error) is isinstance(options, PrefixOptions)


@pytest.mark.parametrize(
    ("command", "lacks"),
    [("route", ("--all", "--engine", "--prompt-cache-key")), ("warm", ("--all",)), ("pin", ("--all",))],
)
def test_a_command_lists_only_what_it_takes(kvpin, command, lacks):
    words = kvpin(command, "--help").stdout.split()
    assert "--token-ids" in words
    assert not {*lacks} & {*words}
    assert {*lacks} <= {*kvpin("flush", "--help").stdout.split()}


@pytest.mark.parametrize(
    ("option", "content", "said"),
    [
        ("messages_file", "{", "--messages-file is not JSON"),
        ("messages_file", "3", "must hold a JSON list of messages"),
        ("messages_file", '{"prompt": "x"}', "must hold a JSON list of messages"),
        ("token_ids", "{}", "must hold a JSON list"),
        ("token_ids", "[", "--token-ids is not JSON"),
    ],
)
def test_a_wrong_file_is_one_line(file, capsys, option, content, said):
    name = file(content)
    fails(capsys, said, **{option: f"@{name}" if option == "token_ids" else name})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"messages_file": "/nowhere"}, "'/nowhere' cannot be read: No such file or directory"),
        ({"token_ids": "1,x"}, "write integers"),
        ({"prompt": "x", "prompt_file": "y"}, "--prompt and --prompt-file exclude each other"),
        ({"token_ids": "1", "everything": True}, "--token-ids and --all exclude each other"),
        ({"everything": True, "tenant": "t"}, "leave out --engine and --tenant"),
        ({"prompt_cache_key": "k", "cache_salt": "s"}, "leave out --cache-salt"),
        ({"model": "m"}, "name a target: use one of --messages-file, "),
    ],
)
def test_wrong_options_are_one_line(capsys, options, said):
    fails(capsys, said, **options)


def fails(capsys, said, **options):
    with pytest.raises(typer.Exit) as caught:
        TargetOptions(**options).body()
    assert caught.value.exit_code == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_bytes_that_are_no_text(tmp_path, capsys):
    (tmp_path / "f").write_bytes(b"\xff\xfe")
    fails(capsys, "is not UTF-8 text", prompt_file=str(tmp_path / "f"))
