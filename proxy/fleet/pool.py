"""Engines that serve the same model, and the index of their KV. State only, see `fleet.py`."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from math import inf
from time import monotonic, time
from typing import Any

from msgspec.structs import replace

from engine_adapter import (
    Capability,
    EngineAdapter,
    EngineGarbled,
    EngineInfo,
    JsonBody,
    KvTarget,
    Role,
    Tier,
    Transfer,
)
from engine_adapter.prompt.template_trials import MessageShape
from engine_adapter.types import Usage
from proxy.core.admission import HOLD_S, KEPT_BUSY, Needs
from proxy.core.audit import Trust
from proxy.core.index.blocks import BlockHash, Chain, chain, namespace_root
from proxy.core.index.match import Match
from proxy.core.peers.messages import OwnRequests
from proxy.core.placement.decision import Candidate, Cost, Placement
from proxy.core.placement.pairs import Prefillers
from proxy.core.placement.placer import PlacedRequest, Placer
from proxy.errors import NotFound
from proxy.fleet.engine import EMPTY, Engine, EngineState
from proxy.fleet.lease import Lease
from proxy.fleet.wait_queue import Line
from proxy.prompt import Prompt, PromptBuilder
from proxy.request.calls import Session
from proxy.settings import LimitSettings

# Seconds that blocks stay pending after their request ends: events of its last step may still arrive.
PENDING_LINGER_S = 0.25
# Namespaces whose roots are remembered: one for each tenant and LoRA adapter.
ROOTS = 4096

# A request that any engine can take.
ANY = Needs()
# The shortest of all prompts.
NO_PROMPT = KvTarget(array("i"))


@lru_cache(ROOTS)
def _root_of(model: str, lora: str | None, salt: str | None, secret: bytes) -> BlockHash:
    return namespace_root(model, lora=lora, salt=salt, secret=secret)


class Pool:
    """Engines that serve the same model, and the index of what they hold."""

    def __init__(
        self,
        model: str,
        tokens_per_block: int,
        queue: LimitSettings | None = None,
        told: OwnRequests | None = None,
        secret: bytes = b"",
    ) -> None:
        """`told` tells other kvpins of its requests; None if there are none. `secret`: the key of the
        namespace roots."""
        self.model, self._secret = model, secret
        self.tokens_per_block = tokens_per_block
        self.engines: dict[str, Engine] = {}
        self.placer = Placer(tokens_per_block)
        self.index = self.placer.index  # the blocks its engines hold
        self._lora_paths: dict[str, str] = {}
        self._told_paths: dict[tuple[str, str], str] = {}  # of each engine
        self.away: dict[str, EngineInfo] = {}  # lost engines, as they were when they were lost
        # Requests that wait because its engines are busy.
        self.line = Line(self.engines_for, self.is_free, queue)
        self._told = told
        self.refresh()

    def join(self, engine: Engine) -> None:
        """Adds an engine that has connected."""
        self.engines[engine.id] = engine
        self.refresh()

    def leave(self, engine: Engine) -> None:
        """Removes an engine."""
        del self.engines[engine.id]
        for told in [told for told in self._told_paths if told[0] == engine.id]:
            del self._told_paths[told]
        self.refresh()

    def render(self, engine: Engine, prompts: PromptBuilder, *, is_proven: bool = False) -> None:
        """From now on the engine gets prompts of this builder. `is_proven`: this connection was compared."""
        engine.prompts, engine.is_proven = prompts, is_proven
        self.refresh()

    def part(self, engine: Engine) -> None:
        """The engine makes other tokens of a prompt than its builder: it gets a builder of its own."""
        others = [each for each in self.engines.values() if each is not engine]
        if engine.prompts is not None and any(each.prompts is engine.prompts for each in others):
            self.render(engine, engine.prompts.copy(), is_proven=engine.is_proven)

    def refresh(self) -> None:
        """Some engine has joined, left, got another builder, or told anew what it is."""
        engines = self.engines.values()
        halves = [each for each in engines if _way_of(each) is not None]
        self.has_roles = any(each.role is not Role.BOTH for each in engines)  # meant for a part of requests
        self.passes_kv = any(each.adapter.transfer is not None for each in engines)
        self.has_halves = bool(halves)  # some answer only together with another one
        self.placer.answering = sum(each.role is Role.DECODE for each in halves)
        told = [info.max_model_len for info in self._infos]
        contexts = sorted(each for each in told if each is not None)
        self._contexts = tuple(contexts)
        # The longest prompt that any of its engines takes, in tokens; None without a limit.
        self.context = contexts[-1] if contexts and None not in told else None
        # For each set of its engines that make the same tokens of the same prompt. Mostly there is one.
        found = dict.fromkeys(each.prompts for each in engines if each.prompts is not None)
        self.renderings = tuple(sorted(found, key=lambda each: (each.is_blank, not each.is_proven)))
        # Messages that the chat template of some of its engines refuses or leaves out.
        self.lost_shapes = frozenset[MessageShape]().union(*(each.lost_shapes for each in self.renderings))

    @property
    def prompts(self) -> PromptBuilder | None:
        """What renders for its first engines; None while none is connected."""
        return self.renderings[0] if self.renderings else None

    def context_for(self, prompt: int, body: JsonBody) -> int:
        """The least context of its engines that takes a prompt of so many tokens, and the answer that `body`
        asks for, if one does; 0 if each of them does."""
        contexts = self._contexts
        if not contexts or contexts[0] == contexts[-1]:
            return 0
        asked = body.get("max_completion_tokens") or body.get("max_tokens")
        tokens = prompt + (asked if type(asked) is int and asked > 0 else 1)
        wanted = max(min(tokens, contexts[-1]), prompt)
        return 0 if wanted <= contexts[0] else next((each for each in contexts if each >= wanted), wanted)

    def root_of(self, salt: str | None, lora: str | None = None) -> BlockHash:
        """The namespace root of the model, a salt and a LoRA adapter."""
        adapter = self.identity_of(lora) if lora is not None else None
        return _root_of(self.model, adapter, salt, self._secret)

    def identity_of(self, lora: str) -> str:
        """The identity of a LoRA adapter: one that was loaded anew from another path has other KV."""
        path = self._lora_paths.get(lora)
        return lora if path is None else f"{lora}\0{path}"

    def note_loras(self, engine: str, info: EngineInfo) -> None:
        """An engine tells where it read its LoRA adapters from. If engines differ, the first counts, until
        one of them has read its adapter anew."""
        for lora, path in info.lora_paths.items():
            before = self._told_paths.get((engine, lora))
            self._told_paths[engine, lora] = path
            if lora not in self._lora_paths or before not in (None, path):
                self._lora_paths[lora] = path

    @property
    def shares_kv(self) -> bool:
        """True if tenants may share the KV of all its engines: requests then have no salt of their tenant."""
        return bool(self.engines) and all(each.adapter.spec.share_kv for each in self.engines.values())

    @property
    def loras(self) -> frozenset[str]:
        """Names of its LoRA adapters, as clients send them as `model`."""
        return frozenset().union(*(info.loras for info in self._infos))

    @property
    def any_model(self) -> bool:
        """True if every engine ignores the model name of a request."""
        return all(info.any_model for info in self._infos)

    @property
    def _infos(self) -> Iterator[EngineInfo]:
        """Declarations of its engines, lost engines included."""
        yield from (engine.info for engine in self.engines.values() if engine.info is not None)
        yield from self.away.values()

    @property
    def served_as_chats(self) -> frozenset[str]:
        """Routes that at least one engine wants as chats: then all engines get the chat."""
        return frozenset().union(*(info.served_as_chats for info in self._infos))

    @property
    def runs_several(self) -> bool:
        """True if each engine takes several choices or prompts in one request."""
        return all(info.runs_several for info in self._infos)

    @property
    def takes_embeds(self) -> bool:
        """True if `prompt_embeds` of a completion are prompts to its engines, as far as is known."""
        return any(info.renders_embeds or info.renders_alike for info in self._infos)

    @property
    def recomputes_prompts(self) -> bool:
        """True if an engine would compute the prompt of several choices for each of them."""
        return any(info.recomputes_prompts for info in self._infos)

    @property
    def card(self) -> dict[str, Any]:
        """The model's fields in `/v1/models` on which all its engines agree."""
        first, *others = (info.card for info in self._infos)
        return {
            name: value
            for name, value in first.items()
            if all(name in other and other[name] == value for other in others)
        }

    def lora_of(self, model: str | None) -> str | None:
        """The LoRA adapter that a request's `model` names; None for the model itself."""
        return model if model is not None and model != self.model and model in self.loras else None

    def chain(self, prompt: Prompt | None) -> Chain | None:
        """The block chain of a prompt; None for an unknown prompt."""
        if prompt is None:
            return None
        root, beginning = self.root_of(prompt.salt, prompt.lora), prompt.beginning
        known = () if beginning is None else beginning.hashes
        made = chain(root, prompt.token_ids, prompt.extra_ids, self.tokens_per_block, known)
        if beginning is not None:
            beginning.learn(made.hashes, self.tokens_per_block)
        return made

    def ready(self) -> list[Engine]:
        """The engines that are ready."""
        return [engine for engine in self.engines.values() if engine.state is EngineState.READY]

    @property
    def serves(self) -> bool:
        """True if an engine is ready and a plain request has somewhere to go: of engines that answer only in
        pairs, one alone takes none."""
        return bool(self.ready() and self.engines_for(ANY))

    @property
    def is_coming_back(self) -> bool:
        """True if an engine that is not ready may become ready soon."""
        states = {engine.state for engine in self.engines.values()}
        return bool(self.away) or not states.isdisjoint({EngineState.CONNECTING, EngineState.DOWN})

    def tokenisers(self, prompts: PromptBuilder | None) -> list[EngineAdapter]:
        """Ready engines of a builder that tokenise requests."""
        return [engine.adapter for engine in self._of(prompts) if engine.can(Capability.TOKENIZE)]

    def renderers(self, prompts: PromptBuilder | None) -> list[EngineAdapter]:
        """Ready engines that return the tokens of a request with images, and the images' positions."""
        return [engine.adapter for engine in self._of(prompts) if engine.can(Capability.RENDER)]

    def embedders(self, prompts: PromptBuilder | None) -> list[EngineAdapter]:
        """Ready engines that return the tokens of a request with prompt embeddings, and identify these."""
        own = self._of(prompts)
        return [engine.adapter for engine in own if engine.info is not None and engine.info.renders_embeds]

    def _of(self, prompts: PromptBuilder | None) -> list[Engine]:
        """The ready engines of a builder; those that are proven, if there are any."""
        own = [engine for engine in self.ready() if engine.prompts is prompts]
        return [engine for engine in own if engine.is_proven] or own

    def candidates(
        self,
        chain: Chain | None,
        prompt: Prompt | None = None,
        needs: Needs = ANY,
        *,
        session: Session | None = None,
        without: Container[str] = (),
    ) -> list[Candidate]:
        """The engines a request may go to: what each holds of its chain or forecasts, and its load."""
        last = None if session is None else self.placer.last_engine(self._key_of(session))
        asked = monotonic(), self.placer.match(chain), prompt, last
        ways = self._partners(needs, without) if self.has_halves else {}
        partners = {way: tuple(self._candidates(engines, *asked)) for way, engines in ways.items()}
        return self._candidates(self._able(needs, without), *asked, partners)

    def _candidates(
        self,
        engines: Iterable[Engine],
        now: float,
        matches: Mapping[str, Match],
        prompt: Prompt | None,
        last: str | None,
        partners: Mapping[str, tuple[Candidate, ...]] = {},
    ) -> list[Candidate]:
        """These engines as candidates; `last`: the one that the conversation was last placed on; `partners`:
        the other halves by their rendezvous."""
        target, whole = (None, True) if prompt is None else (prompt.kv, prompt.whole)
        found = []
        for engine in engines:
            match = matches.get(engine.id)
            forecast = engine.adapter.forecast(target) if target is not None else None
            if forecast is not None and not whole:
                # An engine with slots reuses nothing if it does not know the whole prompt.
                match = forecast = None
            candidate = self.placer.candidate(
                now,
                engine.id,
                match,
                forecast=forecast,
                complete=whole and engine.is_proven and (engine.view is None or engine.view.complete),
                is_last=engine.id == last,
                partners=partners.get(_way_of(engine) or "", ()) if partners else (),
            )
            found.append(candidate)
        return found

    def check_serves(self, native: str) -> None:
        """Raises NotFound if no engine of the pool has this route. Lost engines may have it."""
        if not self.away and not any(engine.serves(native) for engine in self.engines.values()):
            raise NotFound(f"no engine of the model {self.model!r} has the route {native}")

    def engines_for(self, needs: Needs) -> frozenset[str]:
        """The engines a request with these needs may go to."""
        return frozenset(engine.id for engine in self._able(needs))

    def _able(self, needs: Needs, without: Container[str] = ()) -> list[Engine]:
        """The engines that can answer a request. Those that are meant for prefills do so only where no other
        can, and never if they are halves."""
        engines: Collection[Engine] = self.engines.values()
        if self.has_halves:
            ways = self._partners(needs, without)
            engines = [
                each
                for each in engines
                if (way := _way_of(each)) is None or (each.role is Role.DECODE and way in ways)
            ]
            if self._home_computes(needs):
                engines = [each for each in engines if _way_of(each) is not None]
                needs = replace(needs, home=None)
        if self.has_roles:
            answering = [engine for engine in engines if engine.role is not Role.PREFILL]
            if able := _able_of(answering, needs, without):
                return able
        return _able_of(engines, needs, without)

    def computing(self, needs: Needs) -> list[Engine]:
        """The engines that can compute the prompt of a request with these needs, alone or for another one."""
        alone = [engine for engine in self.engines.values() if _way_of(engine) is None]
        halves = self._partners(needs, ()).values()
        return [*_able_of(alone, needs, ()), *(engine for engines in halves for engine in engines)]

    def _partners(self, needs: Needs, without: Container[str]) -> dict[str, list[Engine]]:
        """The engines that can compute a request's prompt for other halves, by their rendezvous. The home of
        a request is the half that answers, unless it only computes prompts."""
        partners: dict[str, list[Engine]] = {}
        for engine in self.engines.values():
            if engine.role is Role.PREFILL and (way := _way_of(engine)) is not None:
                partners.setdefault(way, []).append(engine)
        needs = needs if self._home_computes(needs) else replace(needs, home=None)
        return {way: able for way, engines in partners.items() if (able := _able_of(engines, needs, without))}

    def _home_computes(self, needs: Needs) -> bool:
        """True if a request's home is a half that computes prompts: any other half may answer then."""
        home = self.engines.get(needs.home) if needs.home is not None else None
        return home is not None and home.role is Role.PREFILL and _way_of(home) is not None

    def missing_half(self, needs: Needs = ANY) -> Role | None:
        """The half that keeps the pool from serving a request now; None if that is not why it cannot."""
        if not self.has_halves:
            return None
        halves = [engine for engine in self.engines.values() if engine.adapter.rendezvous is not None]
        for role in (Role.PREFILL, Role.DECODE):
            if not _able_of([engine for engine in halves if engine.role is role], needs, ()):
                return role
        return None

    def prefillers(
        self,
        candidates: Sequence[Candidate],
        chain: Chain,
        lora: str | None,
        moves_by: Callable[[Transfer], bool],
        prompts: PromptBuilder | None = None,
    ) -> Prefillers | None:
        """The engines that may compute a request's prompt for one of the `candidates`, or hold it for them;
        None if there is none.

        `moves_by`: whether the request can be served in two legs, by that transfer. `prompts`: what made its
        prompt; engines of another builder cannot use its KV.
        """
        moved: dict[str, bool] = {}
        givers: dict[str, Engine] = {}
        for engine in self.engines.values():
            transfer = engine.adapter.transfer
            if transfer is None or engine.role is Role.DECODE or not engine.gives_kv(lora):
                continue
            if prompts is not None and not (engine.prompts is prompts and engine.is_proven):
                continue
            if transfer.name not in moved:
                moved[transfer.name] = moves_by(transfer)
            if moved[transfer.name]:
                givers[engine.id] = engine
        if not givers:
            return None
        ways = {name for name, moves in moved.items() if moves}
        decoders = {each.engine for each in candidates if self._pulls(each.engine, ways)}
        prefilling = [name for name, engine in givers.items() if engine.role is Role.PREFILL]
        holders = [each for each in candidates if each.engine in givers and each.engine not in prefilling]
        if not decoders or not (prefilling or holders):
            return None
        now, matches = monotonic(), self.placer.match(chain) if prefilling else {}
        found = [self.placer.candidate(now, each, matches.get(each)) for each in prefilling]
        return self.placer.prefillers(now, found, decoders, holders)

    def _pulls(self, engine_id: str, ways: Collection[str]) -> bool:
        """True if the engine reads KV from others in one of these ways."""
        engine = self.engines[engine_id]
        transfer = engine.adapter.transfer
        return engine.role is not Role.PREFILL and transfer is not None and transfer.name in ways

    def place(
        self, candidates: Sequence[Candidate], chain: Chain | None, prefillers: Prefillers | None = None
    ) -> Placement:
        """Chooses among `candidates`, alone or with one of the `prefillers`; by load alone when the prompt is
        not known."""
        return self.placer.place(monotonic(), candidates, chain, prefillers)

    def is_busy(
        self,
        placement: Placement,
        candidates: Sequence[Candidate],
        waited_s: float = 0.0,
        deadline_s: float | None = None,
    ) -> bool:
        """True if a request that has waited for so long had better wait here. `deadline_s` is how long its
        client does.

        It waits while the slot is busy that is best for it, but no longer than the best idle slot would cost
        it: the total is then at most twice the best possible. It also waits while every engine would begin it
        late. If one is free, it does not: costs already contain the wait at each engine, and each placed
        request raises its engine's cost for the next one.
        """
        if (idle := self._idle_slot(placement, candidates)) is not None:
            return idle[0] == inf or waited_s < min(idle[0], self.line.patience_s(deadline_s))
        return self._begins_late(placement.chosen) and all(map(self._begins_late, placement.all_costs()))

    def at_once(self, placement: Placement, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """The candidates; but if the slot that was chosen is busy, only the one with the best idle slot."""
        idle = self._idle_slot(placement, candidates)
        return candidates if idle is None or idle[0] == inf else [idle[1]]

    def _idle_slot(
        self, placement: Placement, candidates: Sequence[Candidate]
    ) -> tuple[float, Candidate] | None:
        """(what it costs, inf if none is idle; its engine) of the best slot that a request need not wait for.
        None where it waits for no slot."""
        if not self.engines[placement.engine].adapter.one_owner:
            return None  # its adapter does not manage its cache, and foresees nothing
        told = [each.forecast for each in candidates]
        chosen = next(told[at] for at, each in enumerate(candidates) if each.engine == placement.engine)
        if chosen is None or chosen.idle_s is None:
            return None  # without a known prompt, it waits at its engine, if it needs a slot at all
        costs = [inf if each is None else each.at_once_s for each in told]
        return min(costs), candidates[costs.index(min(costs))]

    def is_free(self, engine_id: str) -> bool:
        """True if the engine would soon begin a request, if that has a short prompt."""
        engine, now = self.engines[engine_id], monotonic()
        if (forecast := engine.adapter.forecast(NO_PROMPT)) is not None:
            return forecast.at_once_s < inf
        return not self._is_late(engine, engine.ledger.view(now).queue_s)

    def _begins_late(self, cost: Cost) -> bool:
        engine, wait_s = self.engines[cost.prefiller or cost.engine], cost.queue_s + cost.room_s
        may_be = wait_s > HOLD_S or engine.ledger.backlog.waiting  # mostly not
        return bool(may_be) and self._is_late(engine, wait_s)

    def _is_late(self, engine: Engine, wait_s: float) -> bool:
        """True if a request would wait long at the engine, by the engine's report or by `wait_s`, our
        estimate.
        """
        wait_s = wait_s if self.placer.rates.learned else 0.0
        if engine.ledger.backlog.waiting:
            wait_s = max(wait_s, engine.ledger.backlog.wait_s(monotonic()))
        return wait_s > HOLD_S and len(engine.unanswered) >= KEPT_BUSY

    def lease(
        self,
        placement: Placement,
        chain: Chain | None,
        *,
        streams: bool = False,
        known: bool = True,
        session: Session | None = None,
        part: Role = Role.BOTH,
        on_lost: Callable[[], None] = lambda: None,
        is_late: Callable[[], bool] = lambda: False,
    ) -> Lease:
        """The hold of a request, or of a `part` of it, on its engine, to be entered at once: counts its load,
        marks its blocks pending.

        Nothing is learned from a request whose tokens are not all `known`.

        `on_lost` is called if the engine is lost meanwhile, and `is_late` when it is cancelled: was it
        because the engine was lost or too slow?
        """
        engine, now = self.engines[placement.engine], monotonic()
        key = self._key_of(session)
        placed = self.placer.begin(
            now, engine.id, placement.work, chain, streams=streams, known=known, session=key, part=part
        )
        tell = None
        if self._told is not None:
            digest = session.digest if session is not None else None
            tell = partial(
                self._told.begun, engine.id, chain=chain, streams=streams, known=known, session=digest
            )
        ended = partial(self._ended, engine)
        return Lease(
            engine, placement, self.placer, placed, now, engine.removals, ended, on_lost, is_late, tell=tell
        )

    def _key_of(self, session: Session | None) -> Hashable:
        """Placement's key of a conversation. Kvpins that share their requests use the digest."""
        return session if session is None or self._told is None else session.digest

    def _ended(self, engine: Engine, lease: Lease) -> None:
        # If its engine was lost, the process that is there now holds nothing of it.
        computed = lease.placement.uncached_tokens if lease.succeeded and not lease.is_lost else None
        if lease.telling is not None:
            lease.telling.ended(computed, lease.report)
        if lease.succeeded:
            engine.answered()
        self.end(engine, lease.placed, computed, lease.report)

    def note_empty(self, engine: Engine) -> None:
        """The engine gave an answer without any text."""
        others = (each.empty.texts for each in self.engines.values() if each is not engine)
        if engine.empty.fails(sum(others)):
            engine.refused(EngineGarbled(EMPTY))

    def end(self, engine: Engine, placed: PlacedRequest, computed: int | None, report: Usage | None) -> None:
        """A request on the engine is over, its own or one of another kvpin; see `Placer.end`."""
        placer = self.placer
        placer.end(monotonic(), placed, computed, report)
        if self.line:  # there may be room now
            asyncio.get_running_loop().call_soon(self.line.call_next)
        if computed is None or placed.chain is None or placed.book.is_lost:
            placer.settled(placed)
        elif not self.learn(engine, placed.chain.hashes) and not placer.ended(placed):
            asyncio.get_running_loop().call_later(PENDING_LINGER_S, placer.settled, placed)

    def learn(self, engine: Engine, hashes: tuple[BlockHash, ...]) -> bool:
        """The engine served this chain. Without healthy events, it is assumed to hold it now, and nothing of
        it is pending. Returns whether it is."""
        if engine.audit.trust is not Trust.APPROXIMATE or self.engines.get(engine.id) is not engine:
            return False
        self.index.served(engine.id, hashes)
        if evicted := engine.learned.learn(hashes):
            self.index.remove(engine.id, Tier.GPU, evicted)
        return True

    def forget(self, engine: Engine, hashes: tuple[BlockHash, ...]) -> None:
        """The engine was asked to flush the blocks of this chain."""
        engine.learned.forget(hashes)
        self.index.drop(engine.id, hashes)

    def adopt(self, engine: Engine, stretch: tuple[BlockHash, ...]) -> None:
        """Learns from another kvpin that the engine holds these consecutive blocks, used before all known
        here.
        Does nothing for an engine with events."""
        if engine.audit.trust is Trust.APPROXIMATE:
            new = tuple(block for block in stretch if not self.index.holds(engine.id, block))
            self.index.store(engine.id, Tier.GPU, engine.learned.adopt(new))

    def wipe(self, engine: Engine) -> None:
        """The engine lost its KV, or its view is no longer valid."""
        engine.learned.clear()
        engine.below.clear()
        engine.emptied.append(time())
        self.placer.wipe(engine.id)


def _way_of(engine: Engine) -> str | None:
    """The name of its rendezvous; None for an engine that answers alone."""
    rendezvous = engine.adapter.rendezvous
    return None if rendezvous is None else rendezvous.name


def _able_of(engines: Collection[Engine], needs: Needs, without: Container[str]) -> list[Engine]:
    """Of `engines`, the ready ones that can take a request; without one, the suspect ones: one broken
    connection must not empty a small pool."""
    lora, native, home, kind = needs.lora, needs.native, needs.home, needs.kind
    prompts, context = needs.prompts, needs.context
    for state in (EngineState.READY, EngineState.SUSPECT):
        able = []
        for engine in engines:
            if (
                engine.state is state
                and engine.id not in without
                and (lora is None or lora in engine.loras)
                and (native is None or engine.serves(native))
                and (home is None or home == engine.id)
                and (kind is None or kind == engine.adapter.spec.kind)
                and (prompts is None or engine.prompts is prompts)
                and (not context or engine.takes(context))
                and (not needs.shares or engine.adapter.spec.share_kv)
            ):
                able.append(engine)  # noqa: PERF401 - a list in brackets takes a call
        if able:
            # Never none: where all fail, one may still succeed.
            able = [engine for engine in able if engine.breaker is None or engine.is_allowed] or able
            if needs.route is None:
                return able
            return [engine for engine in able if needs.route not in engine.lacks] or able
    return []
