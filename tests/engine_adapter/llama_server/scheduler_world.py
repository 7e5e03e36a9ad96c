"""A scheduler of the slots of a real llama-server, driven without an adapter."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import time
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress

import httpx

from engine_adapter.http.control import ControlClient
from engine_adapter.llama_server import slot_io
from engine_adapter.llama_server.contents import SlotContents
from engine_adapter.llama_server.discovery import ServerFacts, discover, probe
from engine_adapter.llama_server.mirror_events import MirrorEvents
from engine_adapter.llama_server.requests import SlotAnswer
from engine_adapter.llama_server.saved import SavedEvent, SavedPlace, SavedPrefixes
from engine_adapter.llama_server.saved_files import read_tokens
from engine_adapter.llama_server.scheduler import SlotRequest, SlotScheduler
from engine_adapter.llama_server.server_files import UNKNOWN_OWNER
from engine_adapter.llama_server.slot_io import read_slots
from engine_adapter.llama_server.slots import SlotOperation
from engine_adapter.types import EngineSpec

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
NEVER_SENT = -1
# A long prompt takes many steps, and can be cut short between them.
SMALL_STEPS = ("-b", "32", "-ub", "32")
CHECK_FILE = "kvpin-check.bin"
WAIT_S = 20.0
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # reading the authorities takes longer than a request
_facts: dict[str, ServerFacts] = {}  # of servers by address and process: they never change


class Left(Exception):
    """The client of a request went away."""


class Clock:
    def __init__(self):
        self.ahead = 0.0

    def __call__(self):
        return time.monotonic() + self.ahead


class SchedulerWorld:
    """A scheduler and all it stands on."""

    def __init__(self, server, facts, control, registry):
        self.server, self.facts, self.control, self.registry = server, facts, control, registry
        self.clock = Clock()
        self.mirror = MirrorEvents()
        self.contents = SlotContents("e", facts, control, registry, self.mirror, self.clock)
        self.scheduler = SlotScheduler(self.contents)
        self.table = self.contents.table
        registry.subscribe(self._on_saved, "e")

    def _on_saved(self, event, _entry):
        if event is SavedEvent.REMOVED:
            self.contents.note_files(self.table)

    # --- requests ---------------------------------------------------------------------------------

    async def ask(self, tokens, salt=None, *, retention=None, **sending):
        """The lease of a request when nothing runs on its slot any more; see `send`."""
        lease = None
        with suppress(Left):
            async with self.scheduler.lease(SlotRequest(tokens, salt, retention=retention)) as lease:
                await self.send(lease, **sending)
        await self.idle(lease.slot)
        return lease

    async def send(self, lease, path=COMPLETIONS, *, chunks=None, **fields):
        """Sends a leased request as the adapter does. Its client leaves after `chunks` pieces of the answer:
        0 is when the headers came, NEVER_SENT before it was sent."""
        if chunks == NEVER_SENT:
            raise Left
        thinks = path == CHAT and "think" in self.facts.chat_template
        lease.shows_text = not thinks and "stop" not in fields
        body = {"max_tokens": 4, "temperature": 0, "stream_options": {"include_usage": True}} | fields
        if path == COMPLETIONS:
            body.setdefault("prompt", list(lease.ask.tokens))
        body |= {"id_slot": lease.slot, "cache_prompt": lease.may_reuse, "stream": True}
        answer, count = SlotAnswer(path, lease, assembles=False), 0
        # One connection each: the server closes it after a stream, and does not say so.
        client = httpx.AsyncClient(base_url=self.server.url, timeout=WAIT_S, trust_env=False, verify=_NO_TLS)
        async with client, client.stream("POST", path, json=body) as response:
            if chunks == 0:
                raise Left
            async for chunk in response.aiter_raw():
                if response.is_success:
                    answer.feed(chunk)
                count += 1
                if count == chunks:
                    raise Left
        answer.finish()

    async def complete(self, tokens, slot=None, **fields):
        body = {"prompt": list(tokens), "n_predict": 4, "temperature": 0, "ignore_eos": True} | fields
        return await self.control.call(
            "POST", "/completion", json=body | {"id_slot": -1 if slot is None else slot}
        )

    async def idle(self, *slots):
        """Returns when nothing runs on `slots`, or on any."""
        watched = slots or range(len(self.table))
        await self.until(lambda: all(self.table[slot].is_idle for slot in watched))

    async def until(self, condition, pause_s=0.001):
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 - several tasks and another process change it
                await asyncio.sleep(pause_s)

    async def until_processing(self, slot):
        async with asyncio.timeout(WAIT_S):
            while not (await read_slots(self.control))[slot].is_processing:
                pass

    async def until_asleep(self):
        """Returns when the server sleeps; the scheduler has not seen it yet."""
        async with asyncio.timeout(WAIT_S):
            while not (await slot_io.read_pulse(self.control)).is_sleeping:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)

    def operations(self):
        return [slot.operation for slot in self.table]

    # --- slots and files --------------------------------------------------------------------------

    async def save(self, slot_id):
        return await self.scheduler.take(slot_id, SlotOperation.SAVE, self.contents.save)

    async def erase(self, slot_id):
        await self.scheduler.take(slot_id, SlotOperation.ERASE, self.contents.erase)

    async def restore(self, slot_id, entry):
        return await self.scheduler.take(
            slot_id, SlotOperation.RESTORE, lambda slot: self.contents.restore(slot, entry)
        )

    def entries(self):
        return list(self.contents.all_entries())

    def file(self, entry):
        return self.server.save_dir / entry.name

    async def saved_away(self, tokens, salt=None):
        """A saved prefix of these tokens that lies in no slot."""
        lease = await self.ask(tokens, salt)
        assert await self.save(lease.slot)
        await self.erase(lease.slot)
        return self.entries()[-1]

    async def truth(self, slot_id):
        """The tokens in a slot, from the header of a file the server saves of it."""
        path = self.server.save_dir / CHECK_FILE
        await slot_io.save(self.control, slot_id, CHECK_FILE)
        try:
            return read_tokens(path)
        finally:
            path.unlink()

    async def check(self):
        """What is said of each idle slot is what it holds."""
        states = await read_slots(self.control)
        for slot in self.table.idle():
            truth = await self.truth(slot.id)
            assert truth[: len(slot.tokens)] == slot.tokens, f"slot {slot.id}"
            # Where the server tells nothing, because no request ran there, a slot may be taken for unknown.
            is_told = states[slot.id].n_tokens is not None or slot.salt != UNKNOWN_OWNER
            assert slot.length == len(truth) or not is_told, f"slot {slot.id}"
            assert states[slot.id].n_tokens in (None, len(truth)), f"slot {slot.id}"
            if slot.salt != UNKNOWN_OWNER and slot.saved:
                assert slot.saved <= max(slot.shared(entry.tokens, entry.salt) for entry in self.entries())


@contextmanager
def stopped(server):
    """The server stands still: what it is asked it answers when the block is over."""
    server.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, server.process.pid, os.WSTOPPED | os.WNOWAIT)  # it may answer until all threads stand
    try:
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


@contextmanager
def no_directory(server):
    """While this lasts, no save of the server succeeds."""
    gone = server.save_dir.rename(server.save_dir.with_suffix(".gone"))
    try:
        yield
    finally:
        gone.rename(server.save_dir)


@asynccontextmanager
async def scheduler_world(server, **place):
    """A scheduler of the slots of `server`, which are emptied first, and of its save directory, likewise."""
    spec = EngineSpec("llama_server", server.url, "e")
    async with aclosing(ControlClient(spec)) as control:
        facts = await _facts_of(server, spec, control)
        for slot_id in range(facts.slots):
            await slot_io.erase(control, slot_id)
        for path in server.save_dir.iterdir():
            path.unlink()
        registry = SavedPrefixes(SavedPlace(**{"host": server.save_dir, "host_bytes": 1 << 28} | place))
        world = SchedulerWorld(server, facts, control, registry)
        async with aclosing(world.scheduler):
            yield world
    # Whatever a test did: never two operations on one slot.
    assert world.table.violations == 0
    assert max(world.table.most_in_flight) <= 1


async def _facts_of(server, spec, control):
    key = f"{server.url} {server.process.pid}"
    if key not in _facts:
        _facts[key] = await probe(control, await discover(control, spec), 0, file="probe.bin")
    return _facts[key]
