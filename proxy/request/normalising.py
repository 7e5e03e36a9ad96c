"""Applies the rules of `proxy/core/normalise.py` to the requests that they were chosen for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from engine_adapter import JsonBody
from engine_adapter.body import UnreadableField
from engine_adapter.off_loop import JSON_BYTES_PER_MS, VALUES_PER_MS, off_loop
from proxy.core.normalise import BILLING, FIELDS, Rule, normalised
from proxy.request.calls import Call

ROUTES = frozenset(
    f"/v1/{name}"
    for name in (
        *("chat/completions", "messages", "messages/count_tokens"),
        *("responses", "responses/input_tokens"),
    )
)
"""Routes whose prompts the rules know."""
_MESSAGES = "/v1/messages"
_BILLING = BILLING.encode()


@dataclass(frozen=True, slots=True)
class ChosenRules:
    """Rules that the operator chose for some requests.

    Attributes:
        tenant, model: only for requests of this tenant, and for this model; None for all.
    """

    rules: frozenset[Rule]
    tenant: str | None = None
    model: str | None = None

    def suit(self, tenant: str | None, models: Sequence[str | None]) -> bool:
        """True if they are for requests of a tenant, for a model that has these names."""
        return self.tenant in (None, tenant) and (self.model is None or self.model in models)


@dataclass(frozen=True, slots=True)
class Normalising:
    """The rules of all requests."""

    chosen: Sequence[ChosenRules] = ()

    async def apply(self, call: Call, model: str) -> tuple[Call, tuple[Rule, ...]]:
        """The request with a normalised body, and the rules that changed it. `model`: of its pool."""
        body, route = call.body, call.route
        if not isinstance(body, JsonBody) or route not in ROUTES:
            return call, ()
        if not (self.chosen or route.startswith(_MESSAGES)) or not (rules := self._rules(call, body, model)):
            return call, ()
        changed, applied = await off_loop(
            lambda: _applied(body, rules),
            ms=2 * len(body.raw) / JSON_BYTES_PER_MS + body.n_values / VALUES_PER_MS,
        )
        if not applied:
            return call, ()
        return replace(call, body=changed), applied

    def _rules(self, call: Call, body: JsonBody, model: str) -> frozenset[Rule]:
        names = (model, call.model)
        suiting = [entry.rules for entry in self.chosen if entry.suit(call.tenant, names)]
        if call.route.startswith(_MESSAGES) and _BILLING in body.raw:
            suiting.append(frozenset({Rule.BILLING_LINE}))
        return frozenset().union(*suiting)


NO_RULES = Normalising()
"""No rule was chosen."""


def _applied(body: JsonBody, rules: frozenset[Rule]) -> tuple[JsonBody, tuple[Rule, ...]]:
    wanted = ("system",) if rules == {Rule.BILLING_LINE} else FIELDS
    try:
        fields = {name: body.view(name) for name in wanted if name in body}
    except UnreadableField:  # whoever reads the request next says so
        return body, ()
    changes, applied = normalised(fields, rules)
    return (body.replace(**changes) if applied else body), applied
