"""Facts about a llama-server, read from its own routes.

`discover` only reads, except that it uses one slot of a new process if the model's file is out of reach. What
no route tells, `probe` tries out.

A digest names the model, because KV of one model is noise to another model of the same shape. A GGUF that
kvpin can read is identified by its bytes. Otherwise the digest covers what the server says of the model, and
how the model continues a fixed prompt.
"""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import xxhash

from engine_adapter.errors import EngineRejected, EngineSpecError, EngineUnavailable
from engine_adapter.http.adapter import read_models
from engine_adapter.http.control import ControlClient
from engine_adapter.llama_server import slot_io
from engine_adapter.llama_server.checkpoints import PLAIN, MemoryKind, MemoryRules
from engine_adapter.llama_server.server_files import UNKNOWN_OWNER
from engine_adapter.prompt.gguf_tokenizer import read_metadata
from engine_adapter.types import Capability, EngineSpec, Finding

MOVES = (Capability.OFFLOAD, Capability.RESTORE)
# What kvpin can do where it chooses the slots.
_OF_SLOTS = (Capability.KV_EVENTS, Capability.PIN, Capability.CACHE_SALT, Capability.FLUSH, *MOVES)

_ENDS = 1 << 20  # bytes read at the head (metadata, vocabulary) and at the tail
_SAMPLES, _SAMPLE = 512, 4096  # evenly between: a tensor of 0.2% of the file is hit at least once
_WHOLE = 2 * _ENDS + _SAMPLES * _SAMPLE
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
# A fixed prompt of different ids, small enough for any vocabulary, and the length of its continuation.
_PROMPT = tuple(10 + 37 * i % 331 for i in range(24))
_CONTINUATION = 16
_FLAGS_SHOW = 8  # tokens of it that tell flags apart: fewer, as a slow server has to answer the probe in time


def file_digest(path: Path) -> str:
    """Digest of a GGUF with all its parts: their sizes, and about 4 MiB of each part. Takes milliseconds with
    a warm page cache. Unchanged files are read once."""
    files = ((str(part), part.stat()) for part in model_parts(path))
    return _digest(tuple((name, each.st_size, each.st_mtime_ns, each.st_ino) for name, each in files))


def model_parts(path: Path) -> list[Path]:
    """The files of a model: `path`, or all parts if its name is like `…-00001-of-00003.gguf`."""
    name = _PART.search(path.name)
    if name is None:
        return [path]
    stem = path.name[: name.start()]
    return [path.with_name(f"{stem}-{i:05}-of-{name[2]}.gguf") for i in range(1, int(name[2]) + 1)]


async def _continuation(control: ControlClient, slot_id: int, tokens: int = _CONTINUATION) -> tuple[int, ...]:
    """How the model continues the fixed prompt, on a slot whose content is lost. Raises EngineUnavailable."""
    request = {
        "prompt": _PROMPT, "n_predict": tokens, "temperature": 0, "ignore_eos": True,
        "return_tokens": True, "cache_prompt": False, "id_slot": slot_id,
        "samplers": ["top_k"], "top_k": 1, "mirostat": 0, "grammar": "",  # the server's defaults do not count
    }  # fmt: skip
    match await control.call("POST", "/completion", json=request):
        case {"tokens": [int(), *_] as said}:
            return tuple(said)
        case _:
            raise EngineUnavailable("POST /completion: the answer has no 'tokens'")


@lru_cache(maxsize=64)
def _digest(files: tuple[tuple[str, int, int, int], ...]) -> str:
    state = xxhash.xxh3_128()
    for name, size, _mtime, _inode in files:
        state.update(struct.pack("<Q", size))
        with Path(name).open("rb", buffering=0) as file:
            for offset, length in _samples(size):
                file.seek(offset)
                state.update(file.read(length))
    return state.hexdigest()


def _samples(size: int) -> Iterator[tuple[int, int]]:
    if size <= _WHOLE:
        yield 0, size
        return
    yield 0, _ENDS
    between = size - 2 * _ENDS - _SAMPLE
    for index in range(_SAMPLES):
        yield _ENDS + between * index // (_SAMPLES - 1), _SAMPLE
    yield size - _ENDS, _ENDS


_METADATA = 64 << 20  # bytes of a GGUF that are no tensors, at the most: vocabulary and padding


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One server at the time of the question."""

    model: str
    card: Mapping[str, Any] = field(repr=False)  # its own fields of the model in `/v1/models`
    slots: int
    slot_ctx: int  # context of each, in tokens
    train_ctx: int | None  # context the model was trained with
    local_model: Path | None  # the file of the model, if kvpin can read it
    vocab_size: int | None
    build: str
    chat_template: str = field(repr=False)
    instance: str | None  # a word that is new in each process, None on servers without one. Sleep keeps it.
    is_sleeping: bool  # it was asleep, so the KV of all its slots is gone
    has_slots: bool  # `GET /slots` is allowed
    can_save: bool  # it has a `--slot-save-path`
    fingerprint: str  # digest of the model and the LoRA adapters that make its KV
    continues: tuple[int, ...] = ()  # how the model continues the fixed prompt; empty if unknown
    adapters: list[Any] = field(default_factory=list)  # its LoRA adapters, with the scale of each
    is_unified: bool | None = None  # all slots share one KV pool (`-kvu`); None while unknown
    ram_cache: bool | None = None  # it keeps prompts in its own cache (`--cache-ram`); None while unknown
    kind: MemoryKind | None = None  # of its memory; None while unknown
    memory: MemoryRules = PLAIN  # how much of a slot it reuses, by its kind; the default while unknown
    user_mark: tuple[int, ...] = ()  # tokens that begin a chat's user message; empty if they do not matter
    has_draft: bool = False  # a draft model proposes tokens. Its KV is in no saved file.
    has_media: bool = False  # it takes images, audio or video
    cache_reuse: int | None = None  # the engine's setting: the least run of tokens that it moves

    @property
    def keeps_none_itself(self) -> bool:
        """True if it reuses only what lies in its slots: it has no `--cache-ram`."""
        return self.ram_cache is False

    @property
    def key(self) -> str:
        """16 hex digits of the model and its stream layout. Servers with the same key can share saved files.

        Flags change KV, too (RoPE, overridden metadata, control vectors), and no route tells them: how the
        model continues a fixed prompt does, or else the process, which shares its files with no other.
        A file of a unified pool fits every unified pool. A file of separate streams fits only servers with as
        many slots. So the key is final once `is_unified` is known. KV that may be moved has a key of its own.
        """
        layout = f"{1 if self.is_unified is True else self.slots}{' moved' if self.cache_reuse else ''}"
        flags = self.continues[:_FLAGS_SHOW] or self.instance or UNKNOWN_OWNER
        return xxhash.xxh3_64_hexdigest(f"{self.fingerprint} {layout} {flags}".encode())

    @property
    def identity(self) -> str:
        """Changes with the process, and with the model it serves."""
        return f"{self.instance or ''}{self.fingerprint}"

    @property
    def looks_unified(self) -> bool:
        """Returns `is_unified`. While that is unknown: whether each slot has the whole trained context."""
        if self.is_unified is None:
            return self.slots > 1 and self.slot_ctx == self.train_ctx
        return self.is_unified


class _Settings(msgspec.Struct, frozen=True):
    n_ctx: int


class _Props(msgspec.Struct, frozen=True):
    total_slots: int
    default_generation_settings: _Settings
    model_path: str
    model_alias: str = ""
    chat_template: str = ""
    build_info: str = ""
    media_marker: str | None = None
    is_sleeping: bool = False
    endpoint_slots: bool = False
    modalities: dict[str, bool] = {}


async def discover(
    control: ControlClient, spec: EngineSpec, known: ServerFacts | None = None, *, may_try: bool = True
) -> ServerFacts:
    """Reads what a server is. Wakes a sleeping server. A router's must be asked for one model. No slot is
    used if the facts `known` before are of the same process, or if kvpin only looks [`may_try`]: then the
    digest of a model whose file is out of reach covers less."""
    props = await _props(control, spec)
    model = read_models(await control.get("/v1/models"), spec.model)
    meta = model.card.get("meta")
    meta = meta if isinstance(meta, dict) else {}  # facts about the model's file
    local = await asyncio.to_thread(_local_model, props.model_path, meta.get("size"))
    adapters, continues = await slot_io.read_adapters(control), tuple[int, ...]()
    if known is not None and known.instance == props.media_marker is not None and not known.is_sleeping:
        # The same process, which has not loaded its file again.
        continues = known.continues if known.adapters == adapters else ()
    if local is None and may_try and not continues:
        slot_id = slot_io.spare_slot(await slot_io.read_slots(control)) if props.endpoint_slots else 0
        continues = await _continuation(control, slot_id)
    shape = {name: value for name, value in sorted(meta.items()) if name != "n_ctx"}
    told = [shape, Path(props.model_path).name, continues]
    return ServerFacts(
        model=props.model_alias or model.name,
        card=model.card,
        slots=props.total_slots,
        slot_ctx=props.default_generation_settings.n_ctx,
        train_ctx=_count(meta, "n_ctx_train"),
        local_model=local,
        vocab_size=_count(meta, "n_vocab"),
        build=props.build_info,
        chat_template=props.chat_template,
        instance=props.media_marker,
        is_sleeping=props.is_sleeping,
        has_slots=props.endpoint_slots,
        # The file name is invalid. A server without saves does not check names.
        can_save=await control.status("POST", "/slots/0?action=save", json={"filename": "/"})
        not in (HTTPStatus.NOT_FOUND, HTTPStatus.NOT_IMPLEMENTED),
        fingerprint=await _fingerprint(local, told, adapters),
        continues=continues,
        adapters=adapters,
        is_unified=False if props.total_slots == 1 else None,
        has_media=any(props.modalities.values()),
    )


def findings_of(facts: ServerFacts) -> Iterator[Finding]:
    """The reasons why kvpin cannot use the server fully, the most important first."""
    if facts.ram_cache:
        yield Finding(
            "its RAM cache is on: it changes slots unseen by kvpin, and can corrupt an answer",
            "start the server with --cache-ram 0",
            (Capability.CACHE_SALT,),
        )
    if facts.looks_unified:
        yield _of_pool(facts)
    if not facts.can_save:
        yield Finding(
            "no prefix can be saved or restored",
            "start the server with --slot-save-path DIR, a directory that exists, best in memory",
            (Capability.FLUSH, *MOVES),
        )
    if not facts.has_slots:
        yield Finding("kvpin cannot watch its slots", "start the server with --slots", _OF_SLOTS)
    yield from _of_memory(facts)
    if facts.is_sleeping:
        remedy = "start the server without --sleep-idle-seconds, or with -1"
        yield Finding("it sleeps when idle and loses all KV", remedy)


def _of_memory(facts: ServerFacts) -> Iterator[Finding]:
    """About what keeps KV from being reused, or makes its reuse inexact."""
    if facts.memory.window:
        yield Finding(
            "its model has sliding windows: what is restored would be computed again, so nothing is saved",
            "start the server with --swa-full, which keeps the KV of all tokens: it takes more memory",
            MOVES,
        )
    if facts.has_draft:
        yield Finding(
            "it has a draft model, whose KV is in no saved file: after a restore, requests fail or few "
            "drafts are accepted, so nothing is saved or restored",
            "start the server with as many slots as conversations (-np), or without --model-draft",
            MOVES,
        )
    if not facts.memory.most:
        yield Finding(
            "it makes no context checkpoints: a prompt that does not go on where a slot ends reuses nothing",
            "start the server with --ctx-checkpoints 32, or without that flag",
        )
    if facts.cache_reuse and facts.memory.chunk:
        yield Finding(
            "it moves KV (cache_reuse): answers that use moved KV are not exact, and say so in x-kvpin-note",
            "leave cache_reuse out if all answers are to be exact",
        )
    elif facts.cache_reuse:
        yield Finding(
            "cache_reuse has no effect: KV can be moved only in slots that kvpin manages and has probed, of "
            "models with full attention, without images and draft models",
            "mend what else is found, or leave it out",
        )


def _of_pool(facts: ServerFacts) -> Finding:
    """About slots that share one KV pool, or seem to: -np 2 with twice the context looks like -kvu."""
    flags = f"-no-kvu -np {facts.slots} -c {facts.slots}*CTX, where CTX is the context of one slot"
    if facts.is_unified:
        return Finding(
            "its slots share one KV pool (-kvu, or no -np): a prompt can evict those of other slots",
            f"start the server with {flags}",
            _OF_SLOTS,
        )
    if facts.ram_cache is None and facts.can_save:
        return Finding(
            "it is not known yet whether its slots share one KV pool (-kvu, or no -np), where a prompt can "
            "evict those of other slots",
            "kvpin doctor --probe finds out, and so does kvpin serve on an idle slot",
            _OF_SLOTS,
        )
    return Finding(
        "its slots may share one KV pool (-kvu, or no -np), as each has the model's whole context: kvpin "
        "cannot tell, and leaves them alone",
        f"start the server with --slot-save-path DIR, by which kvpin finds out, and with {flags}",
        _OF_SLOTS,
    )


async def _props(control: ControlClient, spec: EngineSpec) -> _Props:
    at = f"engine {spec.id!r}: {spec.url!r}"
    try:
        props = msgspec.convert(await control.get("/props"), _Props)
    except EngineRejected as error:
        if error.status == HTTPStatus.NOT_FOUND:
            raise EngineSpecError(f"{at} is no llama-server: it has no /props") from error
        raise
    except msgspec.ValidationError as error:
        raise EngineSpecError(f"{at} answers /props as no known llama-server does: {error}") from error
    if props.total_slots < 1:
        raise EngineSpecError(f"{at} has no slots")
    return props


def _count(meta: Mapping[str, Any], name: str) -> int | None:
    count = meta.get(name)
    return count if type(count) is int and count > 0 else None


def _local_model(path: str, size: object) -> Path | None:
    """The model's file if kvpin can read it and it is not another file of the same name. `size` is the
    server's figure for its tensors; the rest of the file is metadata."""
    local = Path(path)
    try:
        parts = model_parts(local)
        total = sum(part.stat().st_size for part in parts)
        for part in parts:
            part.open("rb").close()
    except (OSError, ValueError):  # ValueError: no file has such a name
        return None
    is_the_same = isinstance(size, int) and 0 <= total - size <= _METADATA * len(parts)
    return local if is_the_same else None


async def _fingerprint(local: Path | None, told: list[Any], adapters: list[Any]) -> str:
    """Digest of a model, by its file or what is told of it, and of its LoRA adapters: they change its KV."""
    model = _digest_of(told) if local is None else await asyncio.to_thread(file_digest, local)
    return _digest_of([model, adapters]) if adapters else model


def _digest_of(content: list[Any]) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(content))


# --- what no route tells is tried out: the own prompt cache, how slots share KV, the memory -------------
# Each probe computes a few short prompts on one slot, whose content is lost. The caller chooses it, and when.
# The kind of the memory shows in how much is reused:
#
# 48 tokens, then 8 more           48 reused: no sliding window
# the same 50 tokens, then others  50 reused: can be cut anywhere; fewer: from a checkpoint; 0: there is none

_PROBE_TOKENS = 48
_STATE_WORDS = 7  # of an empty slot's file, before its caches: magic, version, 4 of tokens and their count
# Caches of a model with plain attention, and of one that has sliding windows too.
_PLAIN_ATTENTION, _WITH_WINDOW = 1, 2
_FIRST, _CUT = 48, 50
# The window of a model whose file kvpin cannot read: a guess.
_WINDOW = 1024


def probe_file(spec: EngineSpec | None = None) -> str:
    """The name of the small file that a probe leaves behind: a new one, because servers may share a
    directory; or that of a server whose directory kvpin does not know, where the next probe overwrites it."""
    name = uuid4().hex if spec is None else xxhash.xxh3_64_hexdigest(f"{spec.url} {spec.model}".encode())
    return f"kvpin-probe-{name}.bin"


async def probe(control: ControlClient, facts: ServerFacts, slot_id: int, *, file: str | None) -> ServerFacts:
    """Completes `facts` by trying. Slot `slot_id` must be idle; its content is lost.

    A server that can save leaves `file`, about 50 bytes, in its directory; with None it saves nothing, and
    only its answers tell. A window of fewer than 50 tokens is not found, and beside `--cache-ram` only what a
    file holds. Takes a few milliseconds on an idle server, plus the prefill of about 250 tokens and 8 new
    ones.
    """
    ram_cache = await _has_ram_cache(control, slot_id)
    caches, is_unified, can_save = None, facts.is_unified, facts.can_save
    if can_save and file is not None:
        try:
            await slot_io.erase(control, slot_id)
            size = (await slot_io.save(control, slot_id, file)).size
        except EngineRejected:
            can_save = False  # the directory is gone or full; the server can still be used
        else:
            # The file of an empty slot counts the cells of each stream, and a unified pool is one stream.
            caches = _caches_in(size, facts.slots)
            if is_unified is None and (caches or _caches_in(size, 1)):
                is_unified = caches is None
    kind = None
    if not is_unified:
        grown, cut = (_FIRST, _CUT) if ram_cache else await _tried(control, slot_id)
        has_window = grown < _FIRST
        kind = MemoryKind(
            is_recurrent=not has_window and cut < _CUT,
            has_window=has_window,
            has_checkpoints=cut > 0,
            has_window_in_files=caches == _WITH_WINDOW,
        )
    continues = facts.continues
    if facts.can_save:
        if not continues:
            with suppress(EngineUnavailable, EngineRejected):  # then it shares its files with no other
                continues = await _continuation(control, slot_id, _FLAGS_SHOW)
        await slot_io.erase(control, slot_id)
    found = replace(facts, ram_cache=ram_cache, is_unified=is_unified, can_save=can_save, kind=kind)
    return replace(found, continues=continues)


async def _has_ram_cache(control: ControlClient, slot_id: int) -> bool:
    """True if `--cache-ram` is on: a prompt comes back after another one has replaced it in its slot."""
    first, second = list(range(10, 10 + _PROBE_TOKENS)), list(range(110, 110 + _PROBE_TOKENS))
    for prompt in (first, second):
        await prefill(control, prompt, slot_id)
    return await prefill(control, [*first, second[0]], slot_id) > 0


def _caches_in(size: int, streams: int) -> int | None:
    """The number of caches in an empty slot's file of `size` bytes; None if it is of another kind."""
    counts = (_PLAIN_ATTENTION, _WITH_WINDOW)
    return next((each for each in counts if size == 4 * (_STATE_WORDS + each * (1 + streams))), None)


async def prefill(control: ControlClient, prompt: list[int], slot_id: int) -> int:
    """Computes a prompt on a slot; returns the number of reused tokens."""
    request = {"prompt": prompt, "n_predict": 0, "cache_prompt": True, "id_slot": slot_id}
    match await control.call("POST", "/completion", json=request):
        case {"timings": {"cache_n": int(reused)}}:
            return reused
        case _:
            raise EngineUnavailable("POST /completion: the answer has no 'timings.cache_n'")


async def _tried(control: ControlClient, slot_id: int) -> tuple[int, int]:
    """Tokens that the server reuses of a prompt that goes on, and of one that leaves the slot's content."""
    first, others = list(range(210, 210 + _FIRST)), list(range(310, 318))
    await prefill(control, first, slot_id)
    grown = await prefill(control, [*first, *others], slot_id)
    return grown, await prefill(control, [*first, *others[: _CUT - _FIRST], *others], slot_id)


def memory_rules(kind: MemoryKind, facts: ServerFacts) -> MemoryRules:
    """The rules of a memory of this kind, with the server's default flags. Reads the model's file."""
    if not kind.is_recurrent and not kind.has_window:
        stays = kind.has_window_in_files or facts.has_media or facts.has_draft
        chunk = 0 if stays else facts.cache_reuse or 0
        return replace(PLAIN, loses_window=kind.has_window_in_files, chunk=chunk)
    window = _window(facts.local_model) if kind.has_window else 0
    return MemoryRules(
        slot_ctx=facts.slot_ctx,
        window=_WINDOW if window is None else window,
        is_recurrent=kind.is_recurrent,
        most=PLAIN.most if kind.has_checkpoints else 0,
        is_sure=window is not None,
    )


def _window(model: Path | None) -> int | None:
    """The sliding window of a model by its file, None if that does not tell."""
    try:
        found = read_metadata(model) if model is not None else {}
    except (OSError, ValueError):
        return None
    window = found.get(f"{found.get('general.architecture')}.attention.sliding_window")
    return window if isinstance(window, int) and window > 0 else None
