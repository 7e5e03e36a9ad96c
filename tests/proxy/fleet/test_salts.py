import msgspec

from proxy.request.tenants import MAX_LENGTH, MAX_SALTS, KeptSalts, TenantSalts


def noted(n, tenant="alice"):
    salts = TenantSalts()
    for number in range(n):
        salts.note(tenant, f"{tenant}-{number}")
    return salts


def test_beyond_the_limit_the_longest_unused_is_forgotten_and_the_tenant_says_so():
    salts = noted(MAX_SALTS)
    assert (len(salts.of("alice")), salts.is_complete("alice")) == (MAX_SALTS, True)
    salts.note("alice", "alice-0")  # used again
    salts.note("alice", "one more")
    assert {"alice-0", "one more"} <= salts.of("alice")
    assert "alice-1" not in salts.of("alice")
    assert not salts.is_complete("alice")
    salts.emptied()  # the engine holds nothing forgotten any more
    assert (len(salts.of("alice")), salts.is_complete("alice")) == (MAX_SALTS, True)


def test_they_outlive_the_process():
    salts = noted(2)
    salts.note("bob", "x" * (MAX_LENGTH + 1))
    later = TenantSalts()
    later.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(salts.kept()), type=KeptSalts))
    assert (later.of("alice"), later.is_complete("alice")) == ({"alice-0", "alice-1"}, True)
    assert not later.is_complete("bob")
