"""The command line, and that a real llama-server takes it."""

import os
import subprocess
from pathlib import Path

import pytest

from engine_adapter import EngineSpecError
from engine_adapter.llama_server import command, saved_files
from engine_adapter.llama_server.command import (
    advice,
    check_files,
    check_words,
    default_save_bytes,
    default_save_dir,
    llama_server_command,
    make_save_dir,
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
    assert "--slot-save-path" not in llama_server_command(["-m", "x"], port=1, save_dir=None)


@pytest.mark.parametrize(
    ("words", "absent"),
    [
        (("-np", "8"), "-np"),
        (("--parallel", "8"), "-np"),
        (("--no-slots",), "--slots"),
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


@pytest.mark.parametrize(
    "words",
    ["-m x", "llama-server --model x", "--model-url http://x", "-hf a/b", "--hf-repo a/b", "--docker-repo a",
     "--fim-qwen-7b-spec"],
)  # fmt: skip
def test_words_with_a_model_are_fine(words):
    check_words(words.split())


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
        (("--no-cache-prompt",), "--no-cache-prompt makes"),
        (("--context-shift",), "--context-shift drops"),
        (("--cache-reuse", "256"), "--cache-reuse has no effect"),
        (("--sleep-idle-seconds", "60"), "--sleep-idle-seconds lets"),
        (("-np", "4", "-c", "4096"), None),
        (("-c", "4096"), None),
        (("--context_shift", "--no-context-shift"), None),
        (("--cache-reuse", "0"), None),
        (("--cache-reuse", "512", "--cache_reuse", "0"), None),
        (("-sps", "0.5"), None),
        (("--sleep-idle-seconds", "-1"), None),
    ],
)
def test_each_flag_that_hinders_reuse_is_one_sentence(words, sentence):
    said = advice(("llama-server", "-m", "m.gguf", *words))
    assert [each.startswith(str(sentence)) for each in said] == [True] * (sentence is not None)
    assert "\n" not in "".join(said)


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


GIB = 2**30


@pytest.fixture(autouse=True)
def forget():
    """The answers last as long as the process; each test asks anew."""
    default_save_dir.cache_clear()
    default_save_bytes.cache_clear()
    yield
    default_save_dir.cache_clear()
    default_save_bytes.cache_clear()


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """A directory in the place of /dev/shm, with 4 GiB free; whether it is memory is what `mounts` says."""
    monkeypatch.setattr(command, "_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(saved_files, "_MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(command, "_room", lambda _directory: 4 * GIB)
    monkeypatch.delenv("KVPIN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    saved_files.is_in_memory.cache_clear()
    (tmp_path / "shm").mkdir()
    (tmp_path / "mounts").write_text(
        f"proc /proc proc rw 0 0\nshm {tmp_path / 'shm'} tmpfs rw,size=64k 0 0\n"
    )
    return tmp_path / "shm"


@pytest.mark.parametrize(
    ("mounted", "room", "environment", "expected"),
    [
        pytest.param("tmpfs", 4 * GIB, {}, f"shm/kvpin-{os.getuid()}", id="memory"),
        pytest.param("ext4", 4 * GIB, {}, "cache/kvpin/kv", id="no memory"),
        pytest.param("tmpfs", GIB // 16, {}, "cache/kvpin/kv", id="little memory"),
        pytest.param("ext4", 4 * GIB, {"KVPIN_CACHE": "/elsewhere"}, "/elsewhere/kv", id="another cache"),
    ],
)
def test_kv_is_saved_in_memory_if_there_is_some(memory, monkeypatch, mounted, room, environment, expected):
    saved_files._MOUNTS.write_text(f"proc /proc proc rw 0 0\nshm {memory} {mounted} rw 0 0\n")
    monkeypatch.setattr(command, "_room", lambda _directory: room)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert default_save_dir() == memory.parent / expected


@pytest.mark.parametrize(("room", "cap"), [(4 * GIB, 2 * GIB), (64 * GIB, 8 * GIB), (0, 1)])
def test_half_of_the_room_and_at_most_8_gib(monkeypatch, room, cap):
    monkeypatch.setattr(command, "_room", lambda _directory: room)
    assert default_save_bytes(Path("/kv")) == cap
    monkeypatch.setattr(command, "_room", lambda _directory: 1)
    assert default_save_bytes(Path("/kv")) == cap  # servers that share it agree


def test_the_room_counts_what_lies_there(tmp_path, monkeypatch):
    monkeypatch.setattr(command.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    assert command._room(tmp_path / "not" / "yet") == 1000
    (tmp_path / "kvpin-1.bin").write_bytes(bytes(100))
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    assert command._room(tmp_path) == 1100


def test_the_default_is_made_for_this_user_alone(memory):
    directory = default_save_dir()
    make_save_dir(directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o755)
    make_save_dir(directory)  # again is fine
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_default_that_is_somebody_elses_is_refused(memory, tmp_path, monkeypatch):
    directory = default_save_dir()
    (tmp_path / "theirs").mkdir()
    directory.symlink_to(tmp_path / "theirs")
    with pytest.raises(EngineSpecError, match="is not this user's directory"):
        make_save_dir(directory)
    directory.unlink()
    make_save_dir(directory)
    monkeypatch.setattr(os, "getuid", lambda: directory.stat().st_uid + 1)
    with pytest.raises(EngineSpecError, match="is not this user's directory"):
        make_save_dir(directory)


def test_what_the_operator_chose_keeps_its_rights(memory, tmp_path):
    (tmp_path / "mine").mkdir(mode=0o755)
    make_save_dir(tmp_path / "mine")
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o755
    make_save_dir(tmp_path / "new" / "one")
    assert (tmp_path / "new" / "one").stat().st_mode & 0o777 == 0o700


def test_a_directory_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(EngineSpecError, match=rf"directory '{directory}' for saved KV cannot be made: "):
            make_save_dir(directory)
