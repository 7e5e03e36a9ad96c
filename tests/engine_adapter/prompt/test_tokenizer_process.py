import asyncio
import errno
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import engine_adapter.torch_engine
from engine_adapter import ChatError, EngineSpecError, EngineUnavailable
from engine_adapter.prompt.chat import ChatTokenizer
from engine_adapter.prompt.tokenizer_process import HUB_S, load_tokenizer

DEFAULT = str(Path(engine_adapter.torch_engine.__file__).parent / "default_model")
TEXTS = ("Hello, world!", "zażółć 漢字 🙂", "<|im_start|>user\n", "  x ", "")
PART = {"type": "text", "text": "a"}
CHATS = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [PART]}],
]


@pytest.fixture(autouse=True)
def command(monkeypatch):
    """The process is started by its command, not forked: these tests are about it."""
    monkeypatch.setattr(asyncio, "create_subprocess_exec", asyncio.subprocess.create_subprocess_exec)


async def test_it_is_the_tokenizer_that_loading_here_gives(tokenizer_dir):
    for source in (DEFAULT, str(tokenizer_dir)):
        ours, apart = ChatTokenizer.load(source), await load_tokenizer(source)
        facts = [(t.source, t.encoder.name, t.vocab_size, t.eos_token_id) for t in (ours, apart)]
        assert facts[0] == facts[1]
        for text in TEXTS:
            for special in (True, False):
                ids = ours.encode(text, add_special_tokens=special)
                assert apart.encode(text, add_special_tokens=special) == ids
                assert apart.decode(ids) == ours.decode(ids)
                bare = ours.decode(ids, skip_special_tokens=True)
                assert apart.decode(ids, skip_special_tokens=True) == bare
        for chat in CHATS:
            for tools in (None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]):
                assert apart.render(chat, tools=tools) == ours.render(chat, tools=tools)
        said = [*CHATS[0], {"role": "assistant", "content": "Well,"}]
        more = {"add_generation_prompt": False, "continue_final_message": True}
        assert apart.render(said, **more) == ours.render(said, **more)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("/nowhere/at/all", "is not a directory"),
        ("a/b/c", "is neither a directory nor a model id"),
        ("/nowhere.gguf", "cannot be loaded: "),
    ],
)
async def test_what_cannot_be_loaded_is_one_sentence(source, reason):
    with pytest.raises(EngineSpecError, match=reason) as caught:
        await load_tokenizer(source)
    assert "\n" not in str(caught.value)


async def test_a_hub_out_of_reach_costs_seconds_and_no_output(monkeypatch, capfd):
    """The top-level domain is reserved never to resolve."""
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    with pytest.raises(EngineUnavailable, match="'acme/none' is not on this machine, and"):
        await load_tokenizer("acme/none")
    assert capfd.readouterr() == ("", "")


async def test_a_hub_that_never_answers_is_waited_for_3_seconds(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(EngineUnavailable, match="does not answer within 3 s"):
            await load_tokenizer("acme/none")
        assert time.monotonic() - started > HUB_S


async def test_a_template_that_fills_memory_is_found_when_it_is_loaded(tmp_path, monkeypatch):
    bomb = tmp_path / "bomb"
    shutil.copytree(DEFAULT, bomb)
    (bomb / "chat_template.jinja").write_text("{{ 'a' * 10 ** 10 }}{{ messages }}")
    with pytest.raises((EngineSpecError, ChatError), match=r"GiB of memory|must not make anything as long"):
        (await load_tokenizer(str(bomb))).render(CHATS[0])


async def test_a_loader_that_dies_is_a_reason(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineUnavailable, match="its loader ended with status 1"):
        await load_tokenizer("acme/none")


async def test_one_that_cannot_be_started_now_may_be_later(monkeypatch):
    async def refuse(*_command, **_options):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    with pytest.raises(EngineUnavailable, match="its loader cannot be started: Resource temporarily"):
        await load_tokenizer("some.gguf")


async def test_it_ends_when_nobody_waits_any_more(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    loading = asyncio.create_task(load_tokenizer("acme/none"))
    async with asyncio.timeout(20):
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert os.getpgid(int((tmp_path / "pid").read_text())) != os.getpgrp()  # a signal to the group is kvpin's
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert not Path(f"/proc/{int((tmp_path / 'pid').read_text())}").exists()  # noqa: ASYNC240


@pytest.mark.skipif(sys.platform != "linux", reason="a signal of Linux")
def test_it_ends_with_its_parent_even_if_that_is_killed():
    """The hub is silent, so that the loader lives for seconds."""
    code = """
import asyncio
from engine_adapter.prompt.tokenizer_process import load_tokenizer
asyncio.run(load_tokenizer("acme/none"))
"""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub = f"http://127.0.0.1:{silent.getsockname()[1]}"
        parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "HF_ENDPOINT": hub})
        try:
            silent.settimeout(60)
            asked, _ = silent.accept()  # by the loader, which now waits for 3 s
            with asked:
                parent.kill()
                asked.settimeout(HUB_S / 2)
                while asked.recv(4096):  # until its side is closed; else a time-out
                    pass
        finally:
            parent.kill()
            parent.wait()
