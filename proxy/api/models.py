"""`/v1/models`: the models that clients may name."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import unquote

from starlette.responses import JSONResponse, Response

from proxy.errors import MethodNotAllowed
from proxy.fleet.destinations import refused_model
from proxy.fleet.fleet import Fleet
from proxy.fleet.pool import Pool

READS, ALLOW_READS = ("GET", "HEAD"), "GET, HEAD, OPTIONS"
_MODELS = "/v1/models"


def is_of_models(path: str) -> bool:
    """True if kvpin itself answers requests for this path."""
    return path.startswith(_MODELS) and path[len(_MODELS) :][:1] in ("", "/", "?")


def name_in(path: str) -> str | None:
    """The model that a path names; None for the list of all. A llama-server's model may be named by its
    absolute path: slashes of the name stay."""
    return unquote(path.partition("?")[0].removeprefix(_MODELS).removeprefix("/").rstrip("/")) or None


def answer_models(
    fleet: Fleet,
    method: str,
    path: str,
    elsewhere: Collection[str] = (),
    models: frozenset[str] | None = None,
) -> Response:
    """The list of models, or one of them. An alias has the name it stands for as `root`, as in vLLM. So has a
    name that only engines which take any name serve. `elsewhere`: models of other kvpins, added to the list.
    `models`: the names that the client's key is for; None for all. No other is told of.

    Raises:
        MethodNotAllowed: it is no read.
        NotFound, NoEngine: nothing has that name.
        ModelRefused: the key is not for it.
    """
    asked = path.partition("?")[0]
    if method not in READS:
        raise MethodNotAllowed(f"{asked} takes {ALLOW_READS}, not {method}", allow=ALLOW_READS)
    cards = {name: _card(name, fleet.pools[model]) for name, model in fleet.served().items()}
    cards |= {alias: _alias(alias, cards[own]) for alias, own in fleet.served_aliases().items()}
    name = name_in(path)
    if name is None:
        listed = cards | {other: _plain_card(other) for other in sorted(elsewhere) if other not in cards}
        data = [card for each, card in listed.items() if models is None or each in models]
        return JSONResponse({"object": "list", "data": data})
    if models is not None and (name not in models or name not in cards):
        raise refused_model(name, models)
    if name not in cards:
        pool, _ = fleet.find(name)
        if not pool.any_model:
            raise fleet.not_served(name)
        return JSONResponse(_alias(name, cards[pool.model]))
    return JSONResponse(cards[name])


def _card(name: str, pool: Pool) -> dict[str, object]:
    """A model as clients see it, with its engines' own fields. A LoRA adapter has its model as `parent`, as
    in vLLM."""
    card = _plain_card(name)
    return {**pool.card, **card} if name == pool.model else {**card, "parent": pool.model}


def _plain_card(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "kvpin"}


def _alias(name: str, card: dict[str, object]) -> dict[str, object]:
    """The model of this card under another name."""
    return {**card, "id": name, "root": card["id"]}
