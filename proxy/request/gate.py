"""Admission of a request by its head, before any of its body is read; its priority, deadline and cost.

tenant, head → Gate.admit → Admission → Flow.serve
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Self
from weakref import WeakValueDictionary

from msgspec import Struct

from engine_adapter import JsonBody
from proxy.core.admission import MAX_PRIORITY, MIN_PRIORITY
from proxy.core.quotas import ByteBudget, Quota
from proxy.errors import BadRequest, NoMemory, RateLimited
from proxy.headers import DEADLINE_HEADERS, PRIORITY_HEADER
from proxy.request.calls import Call
from proxy.request.tenants import Tenants

# --- the urgency of a request, in its client's words: its priority, and how long its client waits -------

# Tiers of OpenAI's and Anthropic's APIs. All others are usual.
_TIERS = {"priority": -1, "flex": 1}
# Tokens that an answer costs its tenant: USUAL_ANSWER if the request names no limit. If it names one, that
# limit, but at most MOST_ANSWER: few answers come near a high limit.
USUAL_ANSWER, MOST_ANSWER = 256, 1024
BYTES_PER_TOKEN = 4  # estimate for a prompt that is not tokenised here


def priority_of(call: Call) -> int:
    """The request's priority: the lowest value goes first, 0 is usual. The header counts more than the body's
    `priority`, and that more than its `service_tier`. Raises what `priority_in` raises."""
    if (given := priority_in(call.headers)) is not None:
        return given
    if not isinstance(call.body, JsonBody):
        return 0
    asked = call.body.hint("priority")
    if isinstance(asked, int) and not isinstance(asked, bool):
        return min(max(asked, MIN_PRIORITY), MAX_PRIORITY)
    tier = call.body.hint("service_tier")
    return _TIERS.get(tier, 0) if isinstance(tier, str) else 0


def priority_in(headers: Mapping[str, str]) -> int | None:
    """The priority in a request's header; None without one. Raises BadRequest if it is no whole number within
    the limits."""
    given = headers.get(PRIORITY_HEADER)
    if given is None:
        return None
    with suppress(ValueError):
        if MIN_PRIORITY <= (priority := int(given)) <= MAX_PRIORITY:
            return priority
    rule = f"a whole number from {MIN_PRIORITY} to {MAX_PRIORITY}"
    raise BadRequest(f"the header {PRIORITY_HEADER} must be {rule}")


def deadline_of(call: Call) -> float | None:
    """Seconds that the client waits for its answer; None if it does not say."""
    for name in DEADLINE_HEADERS:
        with suppress(ValueError):
            if (seconds := float(call.headers.get(name, ""))) > 0:
                return seconds
    return None


def prompt_tokens_of(call: Call, known: int | None) -> int:
    """Tokens of the prompt; those of one that is not `known` are estimated."""
    if known is not None:
        return known
    return len(call.body.raw) // BYTES_PER_TOKEN if isinstance(call.body, JsonBody) else 0


def tokens_of(call: Call, known: int | None) -> int:
    """About how many tokens a request costs: its prompt, and its answer."""
    prompt_tokens, body = prompt_tokens_of(call, known), call.body
    if not isinstance(body, JsonBody):
        return prompt_tokens + USUAL_ANSWER
    asked = body.hint("max_completion_tokens") or body.hint("max_tokens")
    is_number = isinstance(asked, int) and asked > 0
    return prompt_tokens + (min(asked, MOST_ANSWER) if is_number else USUAL_ANSWER)


# --- admission of a request by its head, before any of its body is read ---------------------------------

_UNLIMITED = ByteBudget(1 << 62)


class Admission(Struct, eq=False):
    """The permission to serve one request. Use it as a context manager, or `close` it. Only `Gate.admit`,
    `of_kvpin` and `part` make one.

    It holds its request's part of what requests share: the tenant's quota, and memory for bodies that no
    engine has yet. It gives each back exactly once: the memory when the answer begins, the rest when the
    client has its end (`Reply.on_end`). What an engine still does after that does not count for the tenant.
    """

    quota: Quota | None  # the tenant's; None without limits
    _bodies: ByteBudget
    is_counted: bool = False  # the request counts in the tenant's quota until it is closed
    whole: Admission | None = None  # the request of which this is a part
    # When the head was read, in monotonic seconds; None for parts, and for kvpin's own requests.
    came: float | None = None
    since: float | None = None  # the same, also for parts: they share the time limit of their whole
    prompt_is_paid: bool = False  # the tenant was charged for the prompt; later parts inherit this
    _held: int = 0  # bytes
    _parts: set[Admission] = set()  # those that run; each has its own

    @classmethod
    def of_kvpin(cls) -> Admission:
        """Admits a request that kvpin makes itself: it has no tenant, and its body is short."""
        return cls(None, _UNLIMITED)

    def hold(self, size: int) -> None:
        """Notes that `size` bytes of the body are in memory by now. Raises NoMemory if the bodies of all
        requests together would exceed their limit."""
        more = size - self._held
        if more > 0 and not self._bodies.has(more):
            raise _no_memory()
        self._bodies.take(more)
        self._held = size

    def free_body(self) -> None:
        """Gives the memory back: an engine has the body, or nobody needs it any more."""
        if self._held:
            self._bodies.give_back(self._held)
            self._held = 0

    def spend(self, tokens: int) -> None:
        """Charges the tenant for tokens."""
        if self.quota is not None:
            self.quota.spend(tokens)

    def spend_prompt(self, tokens: int) -> None:
        """Charges the tenant for the tokens of the prompt, once."""
        if not self.prompt_is_paid and self.quota is not None:
            self.quota.spend(tokens)
        self.prompt_is_paid = True

    def has_room(self, size: int = 0) -> bool:
        """True if a further part with a body of `size` bytes may run now. One part always may."""
        if not self._parts:
            return True
        return self._bodies.has(size) and (self.quota is None or self.quota.has_room)

    def part(self, size: int = 0) -> Admission:
        """Admits a part of the request, with a body of `size` bytes. The first part that runs takes the place
        of the whole in `concurrent_requests`; each further one counts."""
        if self._parts and self.quota is not None:
            self.quota.join()
        part = Admission(self.quota, self._bodies, whole=self)
        part.prompt_is_paid, part.since, part._held = self.prompt_is_paid, self.since, size
        self._bodies.take(size)
        self._parts.add(part)
        return part

    def close(self, *_error: object) -> None:
        """Gives back everything that the request and its parts hold. A second call does nothing."""
        if self._parts:
            for part in [*self._parts]:
                part.close()
        if self._held:
            self.free_body()
        if self.is_counted and self.quota is not None:
            self.quota.leave()
        self.is_counted = False
        if self.whole is not None:
            running = self.whole._parts  # noqa: SLF001 - of the same class
            running.discard(self)
            if running and self.quota is not None:
                self.quota.leave()
        self.whole = None

    def __enter__(self) -> Self:
        return self

    __exit__ = close


class Gate:
    """Decides by a request's head whether it is admitted."""

    def __init__(self, tenants: Tenants, bodies: ByteBudget, longest: int = 0) -> None:
        """`bodies`: memory for bodies that were read and that no engine has yet. One of several tenants may
        have half of it, or one body. `longest`: bytes that one body may have. Both may be changed."""
        self._tenants, self.bodies, self.longest = tenants, bodies, longest
        # A tenant's budget lives as long as its requests.
        self._by_tenant = WeakValueDictionary[str, ByteBudget]()

    def admit(
        self, tenant: str | None, length: int | None, now: float, *, is_from_peer: bool = False
    ) -> Admission:
        """Admits a request of the tenant, None where requests need no key. It counts until the result is
        closed. `length`: bytes of its body, if its head tells. `now`: monotonic seconds. `is_from_peer`:
        another kvpin passes the request on and has counted it; its tokens are charged here. Raises
        RateLimited if the tenant is over one of its limits, NoMemory if there is no room for its body now."""
        bodies = self.bodies
        if tenant is not None and self._tenants.isolated:
            if (own := self._by_tenant.get(tenant)) is None:
                own = self._by_tenant[tenant] = ByteBudget(0, bodies)
            own.limit = max(bodies.limit // 2, self.longest)
            bodies = own
        if length and not bodies.has(length):
            raise _no_memory()
        quota = self._tenants.quota(tenant)
        if quota is None or is_from_peer:
            return Admission(quota, bodies, came=now, since=now)
        if (denied := quota.enter(now)) is not None:
            raise RateLimited(
                f"the limit {denied.what} = {denied.limit} is reached: try again in {denied.retry_after_s} s",
                retry_after_s=denied.retry_after_s,
            )
        return Admission(quota, bodies, is_counted=True, came=now, since=now)


def _no_memory() -> NoMemory:
    return NoMemory(
        "the bodies of other requests take the memory for them, or the half that one of several tenants may "
        "have; try again shortly",
        retry_after_s=1,
    )
