"""The engines that DNS names: all addresses of a name, or all targets of its SRV records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field

import dns.exception
import dns.name
from dns.asyncresolver import Resolver
from dns.flags import AA
from dns.message import Message
from dns.resolver import NXDOMAIN, Answer

from proxy.fleet.discovery import FoundEngine, FoundEngines, SourceError
from proxy.settings import DiscoverySettings, DnsSource, SrvSource

# The TTL counts between these, in seconds.
_MIN_TTL_S = 1.0
_MAX_TTL_S = 60.0
# Negative answers may come without a TTL.
_NEGATIVE_TTL_S = 5.0


@dataclass(frozen=True, slots=True)
class DnsFinder:
    """Asks for the records of a name. `resolver`: by default, the machine's own (`/etc/resolv.conf`)."""

    settings: DiscoverySettings
    source: DnsSource | SrvSource
    resolver: Resolver = field(default_factory=Resolver, compare=False)

    async def found(self) -> AsyncIterator[FoundEngines]:
        """The engines that the name has, asked for again after each TTL."""
        while True:
            places, ttl_s = await self._ask()
            yield tuple(
                FoundEngine(self.settings.engine(f"{host}-{port}", host, port)) for host, port in places
            )
            await asyncio.sleep(min(max(ttl_s, _MIN_TTL_S), _MAX_TTL_S))

    async def _ask(self) -> tuple[list[tuple[str, int]], float]:
        types = ("SRV",) if isinstance(self.source, SrvSource) else ("A", "AAAA")
        try:
            answers = [
                await self.resolver.resolve(self.source.name, each, raise_on_no_answer=False, search=True)
                for each in types
            ]
        except NXDOMAIN as error:
            self._check_authority(error.responses().values())  # type: ignore[no-untyped-call]  # not in its types
            return [], _NEGATIVE_TTL_S
        except dns.exception.DNSException as error:
            raise SourceError(f"DNS has no answer for {self.source.name!r}: {error}") from error
        places = sorted({place for answer in answers for place in self._places(answer)})
        if not places:
            self._check_authority(answer.response for answer in answers)
            return [], _NEGATIVE_TTL_S
        # A name may have addresses of one family only; then the other answer's TTL says nothing.
        return places, min(answer.chaining_result.minimum_ttl for answer in answers if answer.rrset)

    def _places(self, answer: Answer) -> Iterator[tuple[str, int]]:
        for record in answer.rrset or ():
            if isinstance(self.source, SrvSource):
                if record.target != dns.name.root:  # RFC 2782: the root says that nobody serves it
                    yield record.target.to_text(omit_final_dot=True), record.port
            else:
                yield record.address, self.source.port

    def _check_authority(self, responses: Iterable[Message]) -> None:
        if not all(response.flags & AA for response in responses):
            raise SourceError(f"DNS knows no engine at {self.source.name!r}, but not from its authority")
