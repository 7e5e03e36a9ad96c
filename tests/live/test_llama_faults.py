"""llama-servers that die, hang or come back as another, and host caches that cannot be trusted or written.

All tests share one kvpin; each adds llama-servers of its own to it, as a model of its own.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from scripts.make_gguf import gguf_path
from tests.live.answers import cached, text_of, until
from tests.live.conftest import Kvpin, running_kvpin, wait_until_tokenised
from tests.llama import RunningLlama, llama_server, memory_dir, running_llama_server

pytestmark = pytest.mark.live

WAIT_S = 60.0
# A server that does not answer for this long is lost.
TIMEOUT_S = 3.0
# Every prompt contains this, and no log line may.
SECRET = "Ship"
ANSWER = 8  # tokens
NUMBERS = count()
CLEAR = 0.01  # between the log probabilities of two tokens
KV_BYTES = 2048  # of the tiny model, per token


# --- asking -----------------------------------------------------------------------------------------------


def story(name: str, tokens: int = 400) -> str:
    """A prompt of at least so many tokens, unlike those of other names from its start on."""
    return f"{name} {SECRET} " * (tokens // 5)


@cache
def alone(url: str, text: str) -> str:
    """How the server at `url` answers when it reuses nothing and has nothing else to do, as far as that does
    not hang on the last bits of a sum: those change with the size of a batch."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": ANSWER, "temperature": 0}
    body |= {"cache_prompt": False, "logprobs": True, "top_logprobs": 2}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=WAIT_S, trust_env=False)
    certain = ""
    for token in answer.raise_for_status().json()["choices"][0]["logprobs"]["content"]:
        first, second = (each["logprob"] for each in token["top_logprobs"])
        if first - second < CLEAR:
            break
        certain += token["token"]
    assert certain, "this prompt has no clear answer: take another"
    return certain


def is_hit(answer: httpx.Response) -> bool:
    """Whether all tokens were reused that can be."""
    return cached(answer) == answer.json()["usage"]["prompt_tokens"] - 1


def refused(answer: httpx.Response) -> bool:
    """Whether kvpin answered properly that no engine is ready."""
    assert answer.status_code in (502, 503)
    assert answer.json()["error"]["type"] == "server_error"
    assert answer.json()["error"]["message"]
    return True


# --- the world --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Behind:
    """A llama-server behind kvpin.

    Attributes:
        id: its engine's.
        model: the name it is asked for.
        server: the process; another one after `restart`.
        directory: where it saves.
    """

    kvpin: Kvpin
    id: str
    model: str
    server: RunningLlama
    directory: Path
    right: Callable[[str], str] = field(repr=False)
    start: Callable[..., RunningLlama] = field(repr=False)
    log_begins: int

    def post(self, text: str) -> httpx.Response:
        """A greedy request of one message, and whatever the answer is."""
        messages = [{"role": "user", "content": text}]
        body = {"model": self.model, "messages": messages, "max_tokens": ANSWER, "temperature": 0}
        url = f"{self.kvpin.base_url}/chat/completions"
        return httpx.post(url, json=body, timeout=WAIT_S, trust_env=False)

    def ask(self, text: str) -> httpx.Response:
        """The same; checks that the answer is that of a lone server."""
        answer = self.post(text).raise_for_status()
        assert text_of(answer).startswith(self.right(text))
        return answer

    def waits(self) -> bool:
        """Whether a request waits for a slot."""
        page = httpx.get(f"{self.kvpin.url}/metrics", timeout=WAIT_S, trust_env=False).text
        return bool(re.search(r"^kvpin_queue_requests{.*} [1-9]", page, re.MULTILINE))

    @property
    def engine(self) -> dict[str, Any]:
        """Its state by kvpin's stats; empty while it is lost."""
        return self.kvpin.engines().get(self.id, {})

    @property
    def findings(self) -> list[str]:
        """What keeps kvpin from using it fully."""
        return self.engine["findings"]

    @property
    def kv(self) -> dict[str, Any]:
        """What its adapter tells."""
        return self.engine["kv"]

    def count(self, name: str) -> int:
        return self.kv["counts"][name]

    def restart(self, *flags: str) -> None:
        """A crash, and the next process on the same port."""
        self.server.kill()
        self.server = self.start(*flags, port=self.server.port)

    def log(self) -> list[dict[str, Any]]:
        """What kvpin has logged since the server was added; never a traceback or a prompt."""
        log = self.kvpin.log.read_text()[self.log_begins :]
        assert "Traceback" not in log
        assert SECRET not in log
        return [json.loads(line) for line in log.splitlines() if line.startswith("{")]

    def warnings(self, pattern: str = "") -> list[str]:
        """The sentences of the log that match, if they are warnings or worse."""
        lines = [line for line in self.log() if line["level"] not in ("debug", "info")]
        sentences = [f"{line['event']}: {line.get('error') or line.get('finding', '')}" for line in lines]
        return [sentence for sentence in sentences if re.search(pattern, sentence)]

    def until_ready(self, times: int = 1) -> None:
        """Waits until kvpin has connected to it `times` times."""

        def ready() -> bool:
            lines = [line for line in self.log() if line.get("engine") == self.id]
            return sum(line["event"] == "engine is ready" for line in lines) == times

        until(ready, f"connection {times} to {self.id}")

    def until_saved(self) -> None:
        """Waits until what lies in slots lies in files as well, or is an answer that is not worth a save."""

        def saved() -> bool:
            slots = self.kv["slots"]
            return all(
                slot["operation"] is None and slot["saved"] >= slot["tokens"] - ANSWER for slot in slots
            )

        until(saved, "all slots saved", lambda: self.kv)

    def uses(self) -> dict[str, int]:
        """How often each saved file was restored, of whatever model."""
        return {saved["name"]: saved["uses"] for saved in self.kv["files"]["saved"]}

    def files(self) -> set[str]:
        """The saved files, all whole by their sidecars. Beside them lie records, and a lock."""
        names = {path.name for path in self.directory.iterdir()}
        names = {name for name in names if not name.startswith("kvpin-slots-")}
        saved = {name for name in names if name.endswith(".bin")}
        assert {name.removesuffix(".bin") + ".json" for name in saved} == names - saved
        for name in saved:
            path = self.directory / name
            assert path.stat().st_size == json.loads(path.with_suffix(".json").read_bytes())["size"]
        return saved


@pytest.fixture(scope="module")
def lone(tmp_path_factory) -> Iterator[RunningLlama]:
    """The server that knows what is right."""
    with running_llama_server(tmp_path_factory.mktemp("lone") / "log", slots=1) as server:
        yield server


@pytest.fixture(scope="module")
def kvpin(tmp_path_factory, lone) -> Iterator[Kvpin]:
    """One proxy for all tests here."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("KVPIN_HEALTH__INTERVAL_S", "0.2")
        environment.setenv("KVPIN_HEALTH__TIMEOUT_S", str(TIMEOUT_S))
        log = tmp_path_factory.mktemp("kvpin") / "log"
        with running_kvpin(log, f"--engine=openai_compatible={lone.url},id=lone") as proxy:
            yield proxy


@pytest.fixture
def serve(kvpin, lone, tmp_path) -> Iterator[Callable[..., Behind]]:
    """Starts servers and adds them to kvpin: `serve("--flag", slots=1)`, or `serve(beside=one)` for another
    that shares model and directory."""
    with ExitStack() as servers, ExitStack() as engines:
        begins = len(kvpin.log.read_text())
        started = 0

        def start(*flags: str, **options: Any) -> RunningLlama:
            nonlocal started
            started += 1
            log = tmp_path / f"llama-{started}.log"
            gguf = options.pop("gguf")
            server = servers.enter_context(running_llama_server(log, gguf, *flags, **options))
            servers.callback(server.kill)  # one that is stopped hears nothing else
            return server

        def add(
            *flags: str,
            beside: Behind | None = None,
            slots: int = 2,
            directory: Path | None = None,
            gguf: Path | None = None,
            saves: bool = True,
        ) -> Behind:
            if beside is not None:
                directory = beside.directory
            directory = directory or servers.enter_context(memory_dir())
            again = partial(start, slots=slots, save_dir=directory if saves else None, gguf=gguf)
            server = again(*flags)
            engine = f"llama-{next(NUMBERS)}"
            model = beside.model if beside is not None else engine
            body = {"kind": "llama_server", "url": server.url, "id": engine, "model": model}
            body["host_cache_dir"] = str(directory)
            kvpin.admin("POST", "engines", json=body).raise_for_status()
            engines.callback(lambda: kvpin.admin("DELETE", f"engines/{engine}").raise_for_status())
            behind = Behind(
                kvpin, engine, model, server, directory, partial(alone, lone.url), again, log_begins=begins
            )
            behind.until_ready()
            wait_until_tokenised(kvpin)
            return behind

        yield add


# --- the server dies or hangs -----------------------------------------------------------------------------


@contextmanager
def stopped_in_mid_save(behind: Behind) -> Iterator[Callable[[], Path]]:
    """Stops a server in the midst of its next save; what it yields waits for that and gives the file."""
    before = {path.name for path in behind.directory.iterdir()}
    over = Event()

    def watch() -> Path:
        while not over.is_set():
            with os.scandir(behind.directory) as entries:  # quicker than pathlib: a save takes milliseconds
                names = [entry.name for entry in entries]
            new = [name for name in names if name not in before and name.endswith(".bin")]
            if new:
                behind.server.process.send_signal(signal.SIGSTOP)
                return behind.directory / new[0]
        raise AssertionError("no save began")

    with ThreadPoolExecutor() as pool:
        found = pool.submit(watch)
        try:
            yield partial(found.result, WAIT_S)
        finally:
            over.set()


def stop_in_mid_save(one: Behind) -> tuple[str, Path]:
    """(a prompt, the half of its file); the server is stopped. A save that was over sooner is not the one."""
    for number in range(25):  # on a busy machine, most saves are over before this process gets its turn
        name = f"Ada {number}"
        with stopped_in_mid_save(one) as wait:
            tokens = one.ask(story(name, 2000)).json()["usage"]["prompt_tokens"]
            half = wait()
        if half.stat().st_size < tokens * KV_BYTES:
            return story(name, 2000), half
        one.server.process.send_signal(signal.SIGCONT)
        one.until_saved()
    raise AssertionError("every save was over before the server could be stopped")


def test_a_server_killed_in_mid_save_leaves_nothing_behind(serve):
    one = serve(slots=1)
    long, half = stop_in_mid_save(one)
    whole = one.directory.glob("*.json")
    known = {path.with_suffix(".bin").name for path in whole}
    assert half.name not in known
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(one.post, story("Ben"))
        until(lambda: one.waits() or one.engine.get("in_flight"), "a request that waits")
        one.server.kill()
        refused(waiting.result())
        refused(one.post(story("Ben")))
    one.restart()
    one.until_ready(times=2)
    assert one.files() == known
    assert cached(one.ask(long)) < 16
    one.until_saved()
    one.ask(story("Cyd"))
    assert is_hit(one.ask(long))
    assert one.count("restores") == 1
    one.until_saved()
    assert half.name not in one.files()
    assert len(one.warnings("engine is lost")) == 1


def test_a_server_that_comes_back_at_once_is_another(serve):
    one = serve()
    names = ("Ada", "Ben", "Cyd")
    for name in names:
        one.ask(story(name))
    one.until_saved()
    one.restart()
    # Before kvpin has noticed its prediction may be wrong, and while it notices it cannot serve; no more.
    first = one.post(story("Cyd"))
    assert refused(first) if first.is_error else text_of(first).startswith(one.right(story("Cyd")))
    one.until_ready(times=2)
    for name in names:
        assert is_hit(one.ask(story(name)))
    assert one.count("restores") >= 2
    assert one.count("failed_restores") == 0
    assert len(one.warnings("engine is lost")) == 1


def test_a_server_that_hangs_for_a_while_is_waited_for(serve):
    one = serve()
    one.ask(story("Ada"))
    pid = one.server.process.pid
    # A process of its own wakes it: a busy machine may hold this one up until the server counts as lost.
    for_a_while = f"kill -STOP {pid}; sleep {TIMEOUT_S / 3}; kill -CONT {pid}"
    with subprocess.Popen(["sh", "-c", for_a_while]), ThreadPoolExecutor() as pool:
        list(pool.map(one.ask, map(story, ("Ada", "Ben", "Cyd"))))
    assert is_hit(one.ask(story("Ada")))
    assert one.warnings() == []


def test_a_server_that_hangs_for_long_is_passed_by(serve):
    one = serve()
    two = serve(beside=one)
    names = ("Ada", "Ben", "Cyd")
    one.ask(story("Ada"))
    until(lambda: one.count("saves") + two.count("saves"), "a saved prefix")
    assert len(one.files()) == 1
    hangs, other = (one, two) if one.count("saves") else (two, one)
    hangs.server.process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        # One went where its prefix lies, and on from there; what was saved there is restored elsewhere.
        answers = list(pool.map(one.ask, map(story, names)))
    assert {answer.headers["x-kvpin-engine"] for answer in answers} == {other.id}
    assert is_hit(one.ask(story("Ada")))
    until(lambda: not hangs.engine, "its loss")  # all may have gone to the other at once
    hangs.server.process.send_signal(signal.SIGCONT)
    hangs.until_ready(times=2)
    for name in names:
        assert is_hit(one.ask(story(name)))
    assert len(one.warnings("engine is lost")) == 1


# --- other files --------------------------------------------------------------------------------------


def test_files_of_another_kv_type_are_refused_and_dropped(serve):
    one = serve(slots=1)
    names = ("Ada", "Ben", "Cyd")
    for name in names:
        one.ask(story(name))
        one.until_saved()
    old = one.files()
    one.restart("-ctk", "f32", "-ctv", "f32")
    one.until_ready(times=2)
    for name in names:
        assert cached(one.ask(story(name))) < 16
        one.until_saved()
    for name in names:
        assert is_hit(one.ask(story(name)))
    assert not one.files() & old


# --- nothing can be written -------------------------------------------------------------------------------


def program_that(tmp_path: Path, monkeypatch, line: str) -> None:
    """Servers are started by `line`, a shell command that takes the real command as its words."""
    script = tmp_path / "llama-server"
    script.write_text(f'#!/bin/sh\nset -- {llama_server()} "$@"\n{line}\nexec "$@"\n')
    script.chmod(0o755)
    monkeypatch.setattr("tests.llama.llama_server", lambda: str(script))


@contextmanager
def no_room(one: Behind) -> Iterator[None]:
    """No more bytes go into a server's directory: its file system is full, or its files may not grow."""
    if os.path.ismount(one.directory):
        filler = one.directory / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass
        yield
        filler.unlink()
    else:
        pid, limit = one.server.process.pid, resource.RLIMIT_FSIZE
        before = resource.prlimit(pid, limit, (100_000, resource.RLIM_INFINITY))
        yield
        resource.prlimit(pid, limit, before)


@contextmanager
def read_only(one: Behind) -> Iterator[None]:
    one.directory.chmod(0o555)
    yield
    one.directory.chmod(0o755)


@pytest.fixture
def little_room(tmp_path) -> Iterator[Path]:
    """A file system of 16 MB, where one may be mounted."""
    path = tmp_path / "little"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", path]
    is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    yield path
    if is_mounted:
        subprocess.run(["umount", "-l", path], check=True)


def test_without_room_or_rights_requests_go_on_and_saves_resume(serve, little_room, tmp_path, monkeypatch):
    # A file that may not grow is an error for the server, not its end.
    program_that(tmp_path, monkeypatch, "trap '' XFSZ")
    full = serve(directory=little_room)
    # Root writes everywhere, unless it has laid down the right to.
    program_that(tmp_path, monkeypatch, 'set -- setpriv --bounding-set=-dac_override "$@"')
    locked = serve()
    both = (full, locked)
    for one in both:
        one.ask(story("Ada"))
        one.until_saved()
    kept = {one.id: one.files() for one in both}
    with no_room(full), read_only(locked):
        for one in both:
            one.ask(story("Ben"))
            until(lambda one=one: one.count("failed_saves"), "a save that fails")
            for name in ("Cyd", "Dan"):
                one.ask(story(name))
            # What can be read is read, and each failure says so once.
            assert is_hit(one.ask(story("Ada")))
            assert one.count("saves") == 1
            said = one.warnings(f"{one.id}: a slot could not be saved in {one.directory}")
            assert 1 <= len(said) <= one.count("failed_saves")
            assert {path.name for path in one.directory.glob("*.bin")} == kept[one.id]
    for one in both:
        one.until_saved()
        assert one.count("saves") >= 2
        assert len(one.files()) == one.count("saves")


# --- another model, another setup -------------------------------------------------------------------------


@pytest.mark.parametrize("readable", [True, False], ids=["readable", "unreadable"])
def test_files_of_a_model_that_was_swapped_are_never_restored(serve, tmp_path, monkeypatch, readable):
    gguf = tmp_path / "model.gguf"
    shutil.copyfile(gguf_path("tiny", 0), gguf)
    if not readable:
        # By the name the server has for it, kvpin finds no file.
        program_that(tmp_path, monkeypatch, f"cd {tmp_path}")
    one = serve(gguf=gguf if readable else Path(gguf.name))
    names = ("Ada", "Ben", "Cyd")
    for name in names:
        one.ask(story(name))
        one.until_saved()
    old, right = one.uses(), one.right

    shutil.copyfile(gguf_path("tiny", 1), gguf)
    one.restart()
    one.until_ready(times=2)
    with running_llama_server(tmp_path / "other.log", gguf_path("tiny", 1), slots=1) as other:
        one.right = partial(alone, other.url)
        assert all(one.right(story(name)) != right(story(name)) for name in names)
        for name in names:
            assert cached(one.ask(story(name))) < 16
            one.until_saved()
        for name in names:
            assert is_hit(one.ask(story(name)))
        assert old.items() < one.uses().items()

    shutil.copyfile(gguf_path("tiny", 0), gguf)
    one.restart()
    one.until_ready(times=3)
    one.right = right
    for name in names:
        assert is_hit(one.ask(story(name)))
    assert one.count("restores") == len(names)
    assert one.count("failed_restores") == 0
    assert one.warnings("saved prefix") == []


SETUPS = {
    "ram-cache": ({}, ("--cache-ram", "256"), r"--cache-ram 0"),
    "defaults": ({}, ("-np", "-1", "--cache-ram", "8192"), r"-no-kvu -np 4 -c 4\*CTX"),
    "no-save-path": ({"saves": False}, (), r"--slot-save-path DIR"),
}


@pytest.mark.parametrize("setup", SETUPS)
def test_what_hampers_reuse_is_said_at_once_and_served_right(serve, setup):
    options, flags, sentence = SETUPS[setup]
    one = serve(*flags, **options)
    assert len(one.warnings(sentence)) == 1
    assert any(re.search(sentence, finding) for finding in one.findings)
    said = one.warnings()
    names = ("Ada", "Ben", "Cyd", "Dan")
    with ThreadPoolExecutor() as pool:
        for _ in range(2):
            for name, answer in zip(names, pool.map(one.post, map(story, names)), strict=True):
                assert text_of(answer.raise_for_status()).startswith(one.right(story(name)))
    assert one.warnings() == said
