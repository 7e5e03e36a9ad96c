"""Records kvpin's traffic as a trace that `kvpin replay` reads: arrival times, lengths and shared blocks. No
text and no token ids. Now and then a line tells the figures of the engines.

Beside the tokens, the text is hashed alike, for `kvpin advise`.

A block's id is a keyed hash of its tokens and all tokens before them, of the model, the LoRA adapter and the
tenant's salt. The key is never stored: it is random for each recording, or a secret that several kvpins
share, whose recordings then belong together. With the file, one can count what requests share, but cannot
test whether a request held a guessed text.

    request ends → waits in memory → twice a second, off the event loop: hashed, written
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import secrets
import stat
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from hashlib import blake2b
from io import FileIO
from itertools import count
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import structlog

from engine_adapter import JsonBody, Tier
from engine_adapter.body import UnreadableField
from proxy.core.differences import CONTINUED
from proxy.core.normalise import FIELDS, Fields, Rule, normalised, prompt_parts
from proxy.fleet.engine import Engine
from proxy.fleet.fleet import Fleet
from proxy.fleet.pool import Pool
from proxy.prompt import Prompt
from proxy.replay.trace import ALL, RecordedEngine, Recording, RecordingLine, TextBlocks, TraceLine
from proxy.request.calls import Session
from proxy.request.normalising import ROUTES
from proxy.request.records import RequestRecord
from proxy.settings import SettingsError

# --- the figures of engines for a recording: what they told, and what kvpin measured --------------------

# The median of this many streams is the pace of an engine's answers.
WINDOW = 256
# A shorter answer says little about the pace.
MIN_OUTPUT = 8


class EngineWatch:
    """Measures the pace of answers, and tells all figures of the engines."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._token_s = defaultdict[str, deque[float]](lambda: deque(maxlen=WINDOW))

    def observe(self, record: RequestRecord) -> None:
        """A request ended."""
        pace_s = seconds_per_token(record)
        if pace_s is not None and record.engine is not None:
            self._token_s[record.engine].append(pace_s)

    def engines(self) -> list[RecordedEngine]:
        """The engines that are connected, as they are known now."""
        for gone in self._token_s.keys() - self._fleet.engines.keys():
            del self._token_s[gone]
        pools = self._fleet.pools.values()
        return [self._recorded(pool, engine) for pool in pools for engine in pool.engines.values()]

    def _recorded(self, pool: Pool, engine: Engine) -> RecordedEngine:
        info, rates = engine.info, pool.placer.books[engine.id].rates
        size = (info.tokens_per_block if info is not None else None) or 0
        blocks = (info.gpu_blocks, info.host_blocks) if info is not None else (None, None)
        gpu_tokens, host_tokens = (each * size if each is not None and size else None for each in blocks)
        return RecordedEngine(
            id=engine.id,
            kind=engine.adapter.spec.kind,
            model=pool.model,
            gpu_tokens=gpu_tokens,
            host_tokens=host_tokens,
            prefill=tuple((tokens, seconds * rates.pace) for tokens, seconds in rates.pool.curve),
            samples=rates.pool.samples,
            interference=rates.pool.interference if rates.pool.learned else None,
            restore_tok_s=rates.pool.measured_tok_s.get(Tier.HOST),
            token_s=median(paces) if (paces := self._token_s.get(engine.id)) else None,
        )


def seconds_per_token(record: RequestRecord) -> float | None:
    """Seconds from one token of a stream to the next; None where that is not known."""
    output, first, ended = record.output_tokens, record.first_token_s, record.answered_s
    if record.error is not None or record.died or first is None or ended is None:
        return None
    return None if output is None or output < MIN_OUTPUT else (ended - first) / (output - 1)


# --- prompt text ----------------------------------------------------------------------------------------
# The text of a prompt as hashes, as the engine got it and as rules would make it, for `kvpin advise`
# An id is a keyed hash of a block of 256 bytes and of all bytes before it. The bytes are those of the tools,
# the system prompt and the conversation, in the order in which the chat template writes them. A block ends
# where the tools or the system prompt end.
# Marks for the cache are left out: no prompt contains them.

BLOCK_BYTES = 256
_MARKS = frozenset({"cache_control", "prompt_cache_breakpoint", "id", "status"})


def text_blocks(fields: Fields, keyed: Callable[[], blake2b], *, is_system_first: bool = False) -> TextBlocks:
    """The blocks of a prompt with these fields. `keyed` begins a hash of 8 bytes. `is_system_first`: the chat
    template writes the system prompt before the tools."""
    ids, ends = _hashed(fields, keyed, is_system_first=is_system_first)
    found = TextBlocks(ids, *ends, {})
    for name, rules in (*((rule.value, (rule,)) for rule in Rule), (ALL, tuple(Rule))):
        changes, applied, _ = normalised(fields, rules)
        if applied:
            found.changed[name], _ = _hashed({**fields, **changes}, keyed, is_system_first=is_system_first)
    return found


def _hashed(
    fields: Fields, keyed: Callable[[], blake2b], *, is_system_first: bool
) -> tuple[list[int], tuple[int, int]]:
    """The ids of a prompt, and how many there are up to the end of its tools and of its system prompt."""
    hashed, ids, ends = keyed(), list[int](), list[int]()
    tools, system, rest = prompt_parts(fields)
    for part in (system, tools, rest) if is_system_first else (tools, system, rest):
        text = b"".join(map(_plain, part))
        for at in range(0, len(text), BLOCK_BYTES):
            hashed.update(text[at : at + BLOCK_BYTES])
            ids.append(int.from_bytes(hashed.digest(), "little"))
        ends.append(len(ids) if part else 0)
    if len(text) % BLOCK_BYTES:
        del ids[-1]
    return ids, (ends[1], ends[0]) if is_system_first else (ends[0], ends[1])


def _plain(item: Any) -> bytes:  # noqa: ANN401 - JSON
    """An item of a prompt, without what no prompt contains. A single text is a text, also as a part."""
    if not isinstance(item, dict):
        return msgspec.json.encode(item)
    kept = _unmarked(item)
    if isinstance(content := kept.get("content"), list):
        kept["content"] = [_unmarked(part) for part in content]
        match kept["content"]:
            case [{"type": "text" | "input_text" | "output_text", "text": str(text), **rest}] if not rest:
                kept["content"] = text
    return msgspec.json.encode(kept)


def _unmarked(part: Any) -> Any:  # noqa: ANN401 - JSON
    if not isinstance(part, dict):
        return part
    return {name: value for name, value in part.items() if name not in _MARKS}


# --- recorder -------------------------------------------------------------------------------------------

log = structlog.get_logger(__name__)

# Mooncake's 512 would hide what chats of a thousand tokens share. A pool's own 16 would make lines as long as
# the prompts. With 64, an id of 20 digits stands for 64 tokens.
BLOCK_TOKENS = 64
_BLOCK_BYTES = 4 * BLOCK_TOKENS
# A killed process loses the requests since the last write.
WRITE_S = 0.5
# Seconds between two lines about the engines.
ENGINES_S = 30.0
# Prompts that may wait to be written, in tokens: a disk that hangs must not fill the memory.
MAX_WAITING_TOKENS = 8_000_000
_ID_BYTES = 8
_TEXT = bytes(8 * BLOCK_TOKENS)  # extra ids of a block without any
# Characters of a client's name.
_MOST_NAME = 64
_Waiting = tuple[float, RequestRecord, Prompt, bytes | None, str | None]


class RecordedLine(TraceLine, kw_only=True):
    """A request of a recording, with fields that replay ignores.

    Attributes:
        counted: `output_length` is the number of stream events, because the engine reported no tokens.
        cached_tokens: reused prompt tokens that the engine reported.
        text: the prompt's text as hashes, for `kvpin advise`.
        tenant: its hash, if the operator wants it.
        client: what sent it, by its `user-agent` without version.
    """

    counted: bool = False
    cached_tokens: int | None = None
    text: TextBlocks | None = None
    tenant: str | None = None
    client: str | None = None


class Hasher:
    """Hashes prompts, sessions and tenants for one recording, with its own key."""

    def __init__(self, secret: str | None = None, *, tells_tenants: bool = False) -> None:
        """With a `secret`, equal prompts have equal ids in all recordings that were made with it. Tenants
        have an id only with `tells_tenants`."""
        self._tells_tenants = tells_tenants
        given = blake2b(secret.encode()).digest() if secret is not None else None
        self._key = given or secrets.token_bytes(blake2b.MAX_KEY_SIZE)

    @property
    def key_name(self) -> str:
        """A name for the key, which does not tell it."""
        return self._keyed(b"key").hexdigest()

    def block_ids(self, model: str | None, prompt: Prompt) -> list[int]:
        """One 64-bit id for each full block of the prompt. It covers all tokens before it and the
        namespace."""
        hashed = self._keyed(msgspec.msgpack.encode(("blocks", model, prompt.lora, prompt.salt)))
        tokens, extra_ids, ids = prompt.token_ids.tobytes(), prompt.extra_ids, []
        extras = extra_ids.tobytes() if extra_ids is not None else None
        for at in range(0, len(tokens) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
            block = tokens[at : at + _BLOCK_BYTES]
            extra = extras[2 * at : 2 * (at + _BLOCK_BYTES)] if extras is not None else _TEXT
            hashed.update(b"t" + block if extra == _TEXT else b"x" + block + extra)
            ids.append(int.from_bytes(hashed.digest(), "little"))
        return ids

    def text(
        self, record: RequestRecord, prompt: Prompt, raw: bytes, *, is_system_first: bool
    ) -> TextBlocks | None:
        """The text of a prompt, from the body of its request; None where the body does not have all of it."""
        body = JsonBody(raw)
        if record.route not in ROUTES or CONTINUED in body:
            return None
        try:
            fields = {name: body.get(name) for name in FIELDS if name in body}
        except UnreadableField:
            return None
        scope = msgspec.msgpack.encode(("text", record.served_as, prompt.lora, prompt.salt))
        return text_blocks(fields, lambda: self._keyed(scope), is_system_first=is_system_first)

    def session_id(self, session: Session) -> str:
        """An id for the conversation; equal names of two tenants get different ids."""
        return self._keyed(msgspec.msgpack.encode(("session", *session))).hexdigest()

    def tenant_id(self, tenant: str | None) -> str | None:
        """An id for the tenant; None for no tenant, and where nobody wants it."""
        if tenant is None or not self._tells_tenants:
            return None
        return self._keyed(msgspec.msgpack.encode(("tenant", tenant))).hexdigest()

    def _keyed(self, data: bytes) -> blake2b:
        return blake2b(data, digest_size=_ID_BYTES, key=self._key)


class Recorder:
    """Writes finished requests to a new file, until that is full, fails or is closed."""

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        engines: Callable[[], list[RecordedEngine]] = list,
        secret: str | None = None,
        is_system_first: Callable[[str | None], bool] = lambda _model: False,
        *,
        tells_tenants: bool = False,
    ) -> None:
        """Begins a recording of at most `max_bytes` in a new file: `path`, or `traffic-1.jsonl` if
        `traffic.jsonl` holds another recording. Raises SettingsError if no file can be written there.

        `engines` tells what is known of the engines now. Recordings with the same `secret` can be merged.
        `is_system_first`, called in a thread, tells if the chat template of a model writes the system prompt
        before the tools. With `tells_tenants`, lines have the hash of their tenant."""
        self.path, self._file = _open_new(path)
        self._max_bytes = max_bytes
        self._began, self._began_at = time.monotonic(), time.time()
        self._engines, self._engines_due = engines, -inf
        self._hasher, self._is_system_first = Hasher(secret, tells_tenants=tells_tenants), is_system_first
        self._is_open = True
        self._waiting: list[_Waiting] = []
        self._waiting_tokens = self._unknown = 0
        self._lock = threading.Lock()  # for what threads change: the file, its size and its lines
        self._size = self._recorded = 0

    def observe(self, record: RequestRecord, body: bytes | None = None) -> None:
        """A request ended. It is recorded if its whole prompt is known, with the text of its `body`."""
        if not self._is_open:
            return
        prompt = record.prompt
        if prompt is None or not prompt.whole or not prompt.token_ids:
            self._unknown += record.runs_prompt
            return
        arrived = time.monotonic() - (record.duration_s or 0.0) - self._began
        client = client_of(record.headers.get("user-agent", "")) if record.headers is not None else None
        self._waiting.append((max(arrived, 0.0), record, prompt, body, client))
        self._waiting_tokens += len(prompt.token_ids)
        if self._waiting_tokens > MAX_WAITING_TOKENS:
            self._give_up("the disk is too slow for the traffic")

    async def run(self) -> None:
        """Writes finished requests until the recording ends."""
        log.info("recording traffic as hashes", file=str(self.path))
        while self._is_open:
            await asyncio.sleep(WRITE_S)
            await self.write()

    async def write(self) -> None:
        """Writes the requests that wait."""
        waiting, self._waiting = self._waiting, []
        # A recording without a request stays empty, so that the next start uses its file.
        is_due = time.monotonic() >= self._engines_due and bool(waiting or self._recorded)
        problem = await asyncio.to_thread(self._write, waiting, self._about() if is_due else b"")
        self._waiting_tokens -= sum(len(prompt.token_ids) for _, _, prompt, *_ in waiting)
        if problem is not None and self._is_open:
            self._give_up(problem)

    async def aclose(self) -> None:
        """Writes the rest and ends the recording."""
        self._engines_due = -inf
        await self.write()
        self._is_open = False
        await asyncio.to_thread(self._close)
        log.info(
            "recording ended", file=str(self.path), requests=self._recorded, prompt_unknown=self._unknown
        )

    def _about(self) -> bytes:
        """The line about the recording."""
        self._engines_due = time.monotonic() + ENGINES_S
        about = Recording(self._began_at, self._hasher.key_name, self._unknown, self._engines())
        return msgspec.json.encode(RecordingLine(about)) + b"\n"

    def _give_up(self, problem: str) -> None:
        self._is_open = False
        self._waiting.clear()
        log.warning("recording stopped early; requests go on", file=str(self.path), why=problem)

    # --- in a thread -------------------------------------------------------------------------------

    def _write(self, waiting: Iterable[_Waiting], about: bytes) -> str | None:
        """Writes lines, that `about` the recording first. Returns why the recording must end, None if it goes
        on."""
        data, lines, problem = bytearray(), 0, None
        with self._lock:
            if self._size + len(about) <= self._max_bytes:
                data += about
            for at, record, prompt, body, client in waiting:
                told = line_of(self._hasher, at, record, prompt)
                if body is not None:
                    is_first = self._is_system_first(record.served_as)
                    told.text = self._hasher.text(record, prompt, body, is_system_first=is_first)
                told.client = client
                line = msgspec.json.encode(told) + b"\n"
                if self._size + len(data) + len(line) > self._max_bytes:
                    problem = f"the file has reached record_traffic_bytes, {self._max_bytes}"
                    break
                data += line
                lines += 1
                time.sleep(0)  # lets the event loop run between prompts
            if not self._recorded + lines:
                return problem  # without a request the file stays empty
            try:
                _write_all(self._file, data)
            except OSError as error:
                with suppress(OSError):
                    self._file.truncate(self._size)  # no partial line
                return f"the file cannot be written: {error.strerror}"
            self._size += len(data)
            self._recorded += lines
        return problem

    def _close(self) -> None:
        with self._lock:
            self._file.close()


def client_of(user_agent: str) -> str | None:
    """The name of a client, without its version: `QwenCode` of `QwenCode/0.15.10 (linux; x64)`, `OpenAI/JS`
    of `OpenAI/JS 5.0.1`. None without one."""
    name = user_agent.partition(" ")[0]
    product, _, version = name.partition("/")
    return (product if version[:1].isdigit() else name)[:_MOST_NAME] or None


def line_of(hasher: Hasher, arrived_s: float, record: RequestRecord, prompt: Prompt) -> RecordedLine:
    """The line of a request that arrived `arrived_s` seconds after the recording began, without its text."""
    reported, session = record.output_tokens, record.session
    first_byte_s = record.first_byte_s if record.stream else None
    return RecordedLine(
        timestamp=round(arrived_s * 1000, 1),
        input_length=len(prompt.token_ids),
        output_length=reported if reported is not None else record.events,
        hash_ids=hasher.block_ids(record.served_as, prompt),
        session_id=hasher.session_id(session) if session is not None else None,
        block_tokens=BLOCK_TOKENS,
        model=record.served_as,
        engine=record.placement.engine if record.placement is not None else None,
        status=record.status,
        counted=reported is None and record.events > 0,
        cached_tokens=record.reported_tokens,
        ttft_ms=round(first_byte_s * 1000, 1) if first_byte_s is not None else None,
        queued_ms=round(record.queued_s * 1000, 1) if record.queued_s else None,
        tenant=hasher.tenant_id(record.tenant),
    )


def _open_new(path: Path) -> tuple[Path, FileIO]:
    """Opens an empty file that no other process records to and only this user can read: `path`, or the first
    free numbered name after it."""
    attempts = (path.with_stem(f"{path.stem}-{number}") if number else path for number in count())
    try:
        return next((attempt, file) for attempt in attempts if (file := _open_empty(attempt)) is not None)
    except OSError as error:
        where = error.filename or str(path)
        raise SettingsError(f"record_traffic: {where!r} cannot be written: {error.strerror}") from error


def _open_empty(path: Path) -> FileIO | None:
    """Opens the file to append to it; None if it is not empty, or another process writes it."""
    with ExitStack() as on_failure:
        file = on_failure.enter_context(FileIO(path, "ab", opener=_open_private))
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(file.fileno()).st_size:
                os.fchmod(file.fileno(), 0o600)
                on_failure.pop_all()
                return file
    return None


def _open_private(path: str, flags: int) -> int:
    # Without O_NONBLOCK, opening a pipe would wait for a reader.
    return os.open(path, flags | os.O_NONBLOCK, 0o600)


def _write_all(file: FileIO, data: bytearray) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) or 0 :]
