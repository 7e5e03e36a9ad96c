"""Facts about a llama-server, read from its own routes.

`discover` only reads, except that it uses one slot if the model's file is out of reach. What no route tells,
`probe.py` tries out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from engine_adapter.errors import EngineRejected, EngineSpecError
from engine_adapter.http.control import ControlClient
from engine_adapter.http.models import read_models
from engine_adapter.llama_server.fingerprint import file_digest, model_parts, remote_digest
from engine_adapter.llama_server.slot_io import read_slots, spare_slot
from engine_adapter.types import EngineSpec, Finding

_METADATA = 64 << 20  # bytes of a GGUF that are no tensors, at the most: vocabulary and padding


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One server at the time of the question.

    Attributes:
        model: the name it serves under.
        card: its own fields of the model in `/v1/models`.
        slots: number of slots.
        slot_ctx: context of each, in tokens.
        train_ctx: context the model was trained with, None if unknown.
        local_model: the file of the model, if kvpin can read it.
        vocab_size: number of token ids, None if unknown.
        build: the server's version, free text.
        chat_template: the model's, "" without one.
        instance: a word that is new in each process, None on servers without one. Sleep keeps it.
        is_sleeping: it was asleep, so the KV of all its slots is gone.
        has_slots: `GET /slots` is allowed.
        can_save: it has a `--slot-save-path`.
        fingerprint: digest of the model and the LoRA adapters that make its KV.
        is_unified: all slots share one KV pool (`-kvu`); None while unknown.
        ram_cache: it keeps prompts in its own cache (`--cache-ram`); None while unknown.
    """

    model: str
    card: Mapping[str, Any] = field(repr=False)
    slots: int
    slot_ctx: int
    train_ctx: int | None
    local_model: Path | None
    vocab_size: int | None
    build: str
    chat_template: str = field(repr=False)
    instance: str | None
    is_sleeping: bool
    has_slots: bool
    can_save: bool
    fingerprint: str
    is_unified: bool | None = None
    ram_cache: bool | None = None

    @property
    def key(self) -> str:
        """16 hex digits of the model and its stream layout. Servers with the same key can share saved files.

        A file of a unified pool fits every unified pool. A file of separate streams fits only servers with as
        many slots. So the key is final once `is_unified` is known.
        """
        has_one_stream = self.slots == 1 or self.is_unified is True
        layout = 1 if has_one_stream else self.slots
        return xxhash.xxh3_64_hexdigest(f"{self.fingerprint} {layout}".encode())

    @property
    def looks_unified(self) -> bool:
        """Returns `is_unified`. While that is unknown: whether each slot has the whole trained context."""
        if self.is_unified is None:
            return self.slots > 1 and self.slot_ctx == self.train_ctx
        return self.is_unified


class _Settings(msgspec.Struct, frozen=True):
    n_ctx: int


class _Props(msgspec.Struct, frozen=True):
    """`GET /props`."""

    total_slots: int
    default_generation_settings: _Settings
    model_path: str
    model_alias: str = ""
    chat_template: str = ""
    build_info: str = ""
    media_marker: str | None = None
    is_sleeping: bool = False
    endpoint_slots: bool = False


async def discover(control: ControlClient, spec: EngineSpec) -> ServerFacts:
    """Reads what a server is. Wakes a sleeping server.

    Raises:
        EngineSpecError: it is no llama-server, or has no slots.
        EngineRejected: it refuses, e.g. the API key.
        EngineUnavailable: it does not answer, or is still loading its model.
    """
    props = await _props(control, spec)
    model = read_models(await control.get("/v1/models"))
    meta = _meta(model.card)
    local = await asyncio.to_thread(_local_model, props.model_path, meta.get("size"))
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
        can_save=await _can_save(control),
        fingerprint=await _fingerprint(control, props, meta, local),
        is_unified=False if props.total_slots == 1 else None,
    )


def findings_of(facts: ServerFacts) -> Iterator[Finding]:
    """The reasons why kvpin cannot use the server fully, the most important first."""
    if facts.ram_cache:
        yield Finding(
            "its RAM cache is on: it changes slots unseen by kvpin, and can corrupt an answer",
            "start the server with --cache-ram 0",
        )
    if facts.looks_unified:
        verb = "share" if facts.is_unified else "seem to share"
        yield Finding(
            f"its slots {verb} one KV pool (-kvu, or no -np): a prompt can evict those of other slots",
            f"start the server with -no-kvu -np {facts.slots} -c {facts.slots}*CTX, where CTX is the context "
            "of one slot",
        )
    if not facts.can_save:
        yield Finding(
            "no prefix can be saved or restored",
            "start the server with --slot-save-path DIR, a directory that exists, best in memory",
        )
    if not facts.has_slots:
        yield Finding("kvpin cannot watch its slots", "start the server with --slots")
    if facts.is_sleeping:
        yield Finding(
            "it sleeps when idle and loses all KV",
            "start the server without --sleep-idle-seconds, or with -1",
        )


async def _props(control: ControlClient, spec: EngineSpec) -> _Props:
    try:
        answer = await control.get("/props")
        props = msgspec.convert(answer, _Props)
    except EngineRejected as error:
        if error.status == HTTPStatus.NOT_FOUND:
            raise EngineSpecError(
                f"engine {spec.id!r}: {spec.url!r} is no llama-server: it has no /props"
            ) from error
        raise
    except msgspec.ValidationError as error:
        raise EngineSpecError(
            f"engine {spec.id!r}: {spec.url!r} is no llama-server with one model: /props: {error}"
        ) from error
    if props.total_slots < 1:
        raise EngineSpecError(f"engine {spec.id!r}: {spec.url!r} has no slots")
    return props


async def _can_save(control: ControlClient) -> bool:
    """Whether slots can be saved. The file name is invalid; a server without saves does not check names."""
    status = await control.status("POST", "/slots/0?action=save", json={"filename": "/"})
    return status not in (HTTPStatus.NOT_FOUND, HTTPStatus.NOT_IMPLEMENTED)


def _meta(card: Mapping[str, Any]) -> dict[str, Any]:
    """Facts about the model's file in `/v1/models`; {} where there are none."""
    meta = card.get("meta")
    return meta if isinstance(meta, dict) else {}


def _count(meta: Mapping[str, Any], name: str) -> int | None:
    count = meta.get(name)
    return count if type(count) is int and count > 0 else None


def _local_model(path: str, size: object) -> Path | None:
    """The model's file if kvpin can read it and it is not another file of the same name.

    `size` is the server's figure for its tensors; the rest of the file is metadata.
    """
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


async def _fingerprint(
    control: ControlClient, props: _Props, meta: dict[str, Any], local: Path | None
) -> str:
    if local is not None:
        model = await asyncio.to_thread(file_digest, local)
    else:
        slot_id = spare_slot(await read_slots(control)) if props.endpoint_slots else 0
        model = await remote_digest(control, meta, Path(props.model_path).name, slot_id)
    adapters = await _adapters(control)
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode([model, adapters])) if adapters else model


async def _adapters(control: ControlClient) -> list[Any]:
    """The loaded LoRA adapters: they change the KV of the model."""
    return await control.read_optional(list[Any], "/lora-adapters") or []
