import hashlib

from msgspec.structs import replace

from proxy.core.books import EngineMark
from proxy.peers.bus import Sealing, _seal, secret_of

DRAINED = EngineMark("a", True, 1.0)
ADDED = EngineMark("b", False, 1.0, added=b'{"url":"http://b"}')


def sealing(key):
    return Sealing(lambda: key)


def test_an_added_engine_is_taken_from_one_with_the_same_admin_key():
    told = sealing("k").told([DRAINED, ADDED])
    assert sealing("k").heard(told) == [DRAINED, ADDED]
    for other in ("l", None):
        assert sealing(other).heard(told) == [DRAINED]
    assert sealing("k").heard([ADDED]) == []
    forged = EngineMark("b", False, 1.0, added=b'{"url":"http://c"}', seal=told[1].seal)
    assert sealing("k").heard([forged]) == []


def test_a_digest_of_the_admin_key_seals_nothing():
    """Whoever reads the digest, in a settings file, could add an engine to the group."""
    digest = f"sha256:{hashlib.sha256(b'k').hexdigest()}"
    assert sealing(digest).told([DRAINED, ADDED]) == [DRAINED]
    forged = replace(ADDED, seal=_seal(ADDED, digest.encode()))
    assert sealing(digest).heard([forged]) == []
    assert (secret_of(digest), secret_of(None), secret_of("k")) == (None, None, b"k")


def test_without_an_admin_key_and_with_secrets_it_is_not_told():
    assert sealing(None).told([DRAINED, ADDED]) == [DRAINED]
    for settings in (b'{"api_key":"s"}', b'{"headers":{"x":"y"}}'):
        assert sealing("k").told([DRAINED, EngineMark("b", False, 1.0, added=settings)]) == [DRAINED]
