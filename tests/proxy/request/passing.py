"""An answer that passes stages, and the client that gets it."""

from proxy.request.stages import Staged

STREAM, JSON = "text/event-stream", "application/json"


class Client:
    is_full = False

    def __init__(self):
        self.head, self.chunks = None, []

    def start(self, status, headers):
        self.head = status, headers

    def write(self, chunk):
        self.chunks.append(chunk)

    finish = write

    @property
    def body(self):
        return b"".join(self.chunks)


def passed(*stages, chunks=(), whole=None, kind=STREAM, status=200):
    """The client of an answer: of a stream that comes in these chunks, or of a whole one."""
    client = Client()
    staged = Staged(client, [*stages])
    staged.start(
        status, [(b"content-type", (kind if whole is None else JSON).encode()), (b"content-length", b"9")]
    )
    for chunk in chunks:
        staged.write(chunk)
    staged.finish(whole or b"")
    return client
