"""The command line, and that a real llama-server takes it."""

import subprocess

import pytest

from engine_adapter import EngineSpecError
from engine_adapter.llama_server.command import (
    advice,
    check_files,
    check_words,
    llama_server_command,
    named_api_key,
    named_save_dir,
)
from scripts.make_gguf import gguf_path
from tests.llama import llama_server

MISSING = [
    *("--host", "127.0.0.1", "--port", "4711", "-np", "4", "--slots", "--metrics"),
    *("--slot-save-path", "/kv/", "--cache-ram", "0"),
]


def command_of(*words):
    return llama_server_command(words, port=4711, save_dir="/kv")


@pytest.mark.parametrize("program", [(), ("/opt/llama-server",), ("llama-server",)])
def test_the_name_of_the_binary_may_be_left_out(program):
    command = command_of(*program, "-m", "m.gguf")
    assert command == [*(program or ("llama-server",)), "-m", "m.gguf", *MISSING]
    assert llama_server_command(["-m", "x"], port=1, save_dir=None, binary="/b")[0] == "/b"


@pytest.mark.parametrize(
    ("words", "absent"),
    [
        (("-np", "8"), "-np"),
        (("--parallel", "8"), "-np"),
        (("--no-slots",), "--slots"),
        (("--slots",), "--slots"),
        (("--metrics",), "--metrics"),
        (("-cram", "512"), "--cache-ram"),
        (("--cache-ram", "512"), "--cache-ram"),
        (("--cache_ram", "512"), "--cache-ram"),
        (("--slot-save-path", "/mine"), "--slot-save-path"),
        (("--slot_save_path", "/mine"), "--slot-save-path"),
    ],
)
def test_what_the_operator_says_stays_and_is_not_said_again(words, absent):
    command = command_of("-m", "m.gguf", *words)
    assert command[3 : 3 + len(words)] == list(words)
    added = command[3 + len(words) :]
    assert absent not in added
    assert all(word in MISSING for word in added)
    assert len(added) < len(MISSING)


def test_without_a_directory_nothing_is_saved():
    assert "--slot-save-path" not in llama_server_command(["-m", "x"], port=1, save_dir=None)


def test_a_directory_ends_with_one_slash():
    command = llama_server_command(["-m", "x"], port=1, save_dir="/kv/")
    assert command[command.index("--slot-save-path") + 1] == "/kv/"


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "x"),
        ("llama-server", "--model", "x"),
        ("-mu", "http://x"),
        ("--model-url", "http://x"),
        ("--model_url", "http://x"),
        ("-hf", "a/b"),
        ("-hfr", "a/b"),
        ("--hf-repo", "a/b"),
        ("-dr", "a"),
        ("--docker-repo", "a"),
        ("--fim-qwen-7b-spec",),
        ("--gpt-oss-20b-default",),
    ],
)
def test_words_with_a_model_are_fine(words):
    check_words(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "names no model: add -m FILE"),
        (("llama-server",), "names no model"),
        (("-np", "4"), "names no model"),
        (("--models-dir", "/models"), "names no model"),
        (("--embd-normalize", "2"), "names no model"),
        (("-md", "draft.gguf"), "names no model"),
        (("-m", "x", "--port", "8080"), "--port is chosen by kvpin: leave it out"),
        (("-m", "x", "--host=0.0.0.0"), "--host is chosen by kvpin: leave it out"),
    ],
)
def test_words_no_server_can_be_started_with(words, message):
    with pytest.raises(EngineSpecError, match=message) as caught:
        check_words(words)
    assert "\n" not in str(caught.value)


def test_a_binary_that_is_not_there_is_told(tmp_path):
    with pytest.raises(EngineSpecError, match=r"no program '/nowhere/llama-server'.*scripts/llama-server"):
        check_files(["/nowhere/llama-server", "-m", "x"])
    with pytest.raises(EngineSpecError, match=r"no program 'no-such-server' \(named by LLAMA_SERVER\)"):
        check_files(["-m", "x"], binary="no-such-server")


def test_a_model_file_that_is_not_there_is_told_unless_it_is_to_be_downloaded(tmp_path):
    with pytest.raises(EngineSpecError, match=r"model file '/nowhere/m\.gguf' does not exist"):
        check_files(["true", "-m", "/nowhere/m.gguf"])
    check_files(["true", "-m", "/nowhere/m.gguf", "-mu", "http://x"])
    check_files(["true", "-hf", "a/b"])
    (tmp_path / "m.gguf").touch()
    check_files(["true", "--model", str(tmp_path / "m.gguf")])


def test_what_the_words_say_of_the_server():
    words = ["-m", "x", "--slot-save-path", "/a", "--slot_save_path", "/b", "--api-key", "k1,k2"]
    assert named_save_dir(words) == "/b"
    assert named_api_key(words) == "k1"
    assert named_save_dir(["-m", "x"]) is None
    assert named_api_key(["-m", "x"]) is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--cache-ram", "512"), "--cache-ram other than 0"),
        (("-cram", "-1"), "--cache-ram other than 0"),
        (("-kvu",), "-kvu shares one KV buffer"),
        (("--kv_unified",), "-kvu shares one KV buffer"),
        (("-np", "-1"), "-np below 1"),
        (("--no-slots",), "--no-slots hides"),
        (("--no-cache-prompt",), "--no-cache-prompt makes"),
        (("--context-shift",), "--context-shift drops"),
        (("--cache-reuse", "256"), "--cache-reuse reuses shifted KV"),
        (("--sleep-idle-seconds", "60"), "--sleep-idle-seconds lets"),
    ],
)
def test_what_works_against_reuse_is_one_sentence(words, sentence):
    (said,) = advice(("llama-server", "-m", "m.gguf", *words))
    assert said.startswith(sentence)
    assert "\n" not in said


@pytest.mark.parametrize(
    "words",
    [
        ("-np", "4", "-c", "4096"),
        ("-c", "4096"),
        ("--cache-ram", "0"),
        ("-kvu", "-no-kvu"),
        ("--no-slots", "--slots"),
        ("--cache-reuse", "0"),
        ("--cache-ram", "512", "-cram", "0"),
        ("-sps", "0.5"),
        ("--sleep-idle-seconds", "-1"),
    ],
)
def test_what_does_not_is_not_mentioned(words):
    assert advice(("-m", "m.gguf", *words)) == ()


def test_a_real_server_knows_every_flag(tmp_path):
    """`--version` ends it once all flags before it were read."""
    words = [llama_server(), "-m", str(gguf_path("tiny")), "-no-kvu"]
    command = [*llama_server_command(words, port=1, save_dir=str(tmp_path)), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "invalid argument" not in done.stderr
    assert "version" in done.stdout + done.stderr


def test_a_bare_name_is_the_binary_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["llama-server", "-m", "m.gguf"]
    assert llama_server_command(words, port=1, save_dir=None, binary="/opt/llama")[0] == "/opt/llama"
    (tmp_path / "llama-server").write_text("")
    (tmp_path / "llama-server").chmod(0o755)
    assert llama_server_command(words, port=1, save_dir=None, binary="/opt/llama")[0] == "llama-server"
