"""Engines that a DNS server names, over a real socket."""

import asyncio
import contextlib

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest
from dns.asyncresolver import Resolver

from proxy.fleet import discovery_dns as finder
from proxy.fleet.discovery import SourceError
from proxy.fleet.discovery_dns import DnsFinder
from proxy.settings import DiscoverySettings


class Server(asyncio.DatagramProtocol):
    """Answers from `records`: (name, type) → texts. Says `rcode` for other names."""

    def __init__(self):
        self.records, self.rcode, self.is_authority, self.ttl = {}, dns.rcode.NXDOMAIN, False, 0

    def connection_made(self, transport):
        self.transport = transport

    def datagram_received(self, data, sender):
        query = dns.message.from_wire(data)
        question = query.question[0]
        name, type_ = question.name.to_text(), dns.rdatatype.to_text(question.rdtype)
        response = dns.message.make_response(query)
        response.flags |= dns.flags.AA if self.is_authority else 0
        texts = self.records.get((name, type_), ())
        if texts:
            response.answer.append(dns.rrset.from_text(name, self.ttl, "IN", type_, *texts))
        elif not any(name == known for known, _ in self.records):
            response.set_rcode(self.rcode)
        self.transport.sendto(response.to_wire(), sender)


@contextlib.asynccontextmanager
async def looking(source):
    """A server, and what a finder that asks it finds."""
    transport, server = await asyncio.get_running_loop().create_datagram_endpoint(
        Server, local_addr=("127.0.0.1", 0)
    )
    resolver = Resolver(configure=False)
    resolver.nameservers, resolver.port = ["127.0.0.1"], transport.get_extra_info("sockname")[1]
    settings = DiscoverySettings(source=source, kind="vllm")
    sets = DnsFinder(settings, settings.place, resolver).found()
    try:
        yield server, sets
    finally:
        await sets.aclose()
        transport.close()


def urls(found):
    return [each.entry.url for each in found]


async def test_all_addresses_of_both_families_each_time_the_ttl_ends(monkeypatch):
    monkeypatch.setattr(finder, "_MIN_TTL_S", 0.0)
    async with looking("dns://vllm.svc.:8000") as (server, sets):
        server.records["vllm.svc.", "A"] = ["10.0.0.2", "10.0.0.1"]
        assert urls(await anext(sets)) == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
        server.records["vllm.svc.", "A"] = ["10.0.0.2"]
        server.records["vllm.svc.", "AAAA"] = ["fd00::1"]
        assert urls(await anext(sets)) == ["http://10.0.0.2:8000", "http://[fd00::1]:8000"]


async def test_the_targets_of_srv_records_with_their_ports_and_the_root_is_none():
    async with looking("srv://_http._tcp.vllm.svc.") as (server, sets):
        records = ["0 0 0 .", "0 1 8001 b.svc.", "0 1 8000 a.svc."]
        server.records["_http._tcp.vllm.svc.", "SRV"] = records
        found = await anext(sets)
        assert urls(found) == ["http://a.svc:8000", "http://b.svc:8001"]
        assert [each.entry.id for each in found] == ["a.svc-8000", "b.svc-8001"]


@pytest.mark.parametrize("known", [{}, {("vllm.svc.", "TXT"): ["x"]}], ids=["no name", "no data"])
async def test_an_empty_answer_counts_only_from_the_authority(known):
    async with looking("dns://vllm.svc.:8000") as (server, sets):
        server.records, server.is_authority = known, True
        assert await anext(sets) == ()
    async with looking("dns://vllm.svc.:8000") as (server, sets):
        server.records = known
        with pytest.raises(SourceError, match=r"no engine at 'vllm\.svc\.', but not from its authority"):
            await anext(sets)


async def test_a_server_that_fails():
    async with looking("dns://vllm.svc.:8000") as (server, sets):
        server.rcode = dns.rcode.SERVFAIL
        with pytest.raises(SourceError, match=r"DNS has no answer for 'vllm\.svc\.': .*SERVFAIL"):
            await anext(sets)
