import hashlib

from msgspec.structs import replace

from proxy.core.books import EngineMark
from proxy.peers.bus import _seal, proven_marks, sealed_marks, secret_of

DRAINED = EngineMark("a", True, 1.0)
ADDED = EngineMark("b", False, 1.0, added=b'{"url":"http://b"}')


def test_an_added_engine_is_taken_from_one_with_the_same_admin_key():
    told = sealed_marks([DRAINED, ADDED], b"k")
    assert proven_marks(told, b"k") == [DRAINED, ADDED]
    for other in (b"l", None):
        assert proven_marks(told, other) == [DRAINED]
    assert proven_marks([ADDED], b"k") == []
    forged = EngineMark("b", False, 1.0, added=b'{"url":"http://c"}', seal=told[1].seal)
    assert proven_marks([forged], b"k") == []


def test_a_digest_of_the_admin_key_seals_nothing():
    """Whoever reads the digest, in a settings file, could add an engine to the group."""
    digest = f"sha256:{hashlib.sha256(b'k').hexdigest()}"
    assert (secret_of(digest), secret_of(None), secret_of("k")) == (None, None, b"k")
    assert sealed_marks([DRAINED, ADDED], None) == [DRAINED]
    forged = replace(ADDED, seal=_seal(ADDED, digest.encode()))
    assert proven_marks([forged], secret_of(digest)) == []


def test_what_holds_a_secret_is_not_told():
    for settings in (b'{"api_key":"s"}', b'{"headers":{"x":"y"}}'):
        assert sealed_marks([DRAINED, EngineMark("b", False, 1.0, added=settings)], b"k") == [DRAINED]
