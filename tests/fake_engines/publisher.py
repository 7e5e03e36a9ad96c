"""vLLM's event sockets, and their failures."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import zmq

END_OF_REPLAY = b"\xff" * 8


class Publisher:
    """A PUB socket and, unless `replay` is False, a ROUTER that replays the last batches.

    Frames are `[topic, seq, payload]`, in a replay `[b"", topic, seq, payload]`, as in vLLM.

    Attributes:
        endpoint, replay_endpoint: addresses; the second is None without replay.
    """

    def __init__(
        self,
        *,
        topic: str = "kv",
        replay: bool = True,
        rank: int = 0,
        ports: tuple[int, int] = (0, 0),
    ) -> None:
        """`ports` are those of events and replay, 0 for any free one."""
        self.topic = topic
        self._rank = rank
        self._lock = threading.Lock()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=10_000)
        self._next = 0
        self.endpoint = f"tcp://127.0.0.1:{ports[0]}"
        self.replay_endpoint = f"tcp://127.0.0.1:{ports[1]}" if replay else None
        self._open()

    @property
    def published(self) -> int:
        """Batches published since the start, or the last restart."""
        return self._next

    def publish(self, events: list[object]) -> None:
        """Publishes one batch; nothing without events."""
        if not events:
            return
        payload = msgspec.msgpack.encode([time.time(), events, self._rank])
        with self._lock:
            sequence, self._next = self._next, self._next + 1
            self._buffer.append((sequence, payload))
            self._pub.send_multipart(self._frames(sequence.to_bytes(8, "big"), payload))

    def forget(self, *, but: int = 0) -> None:
        """Empties the replay buffer, but for the last batches."""
        with self._lock:
            while len(self._buffer) > but:
                self._buffer.popleft()

    def restart(self) -> None:
        """Acts like a new process at the same addresses: connections end, numbers start at 0."""
        self.close()
        self._buffer.clear()
        self._next = 0
        self._open()

    def close(self) -> None:
        """Closes both sockets; a second call does nothing."""
        if self._context.closed:
            return
        with self._lock:
            self._pub.close(linger=0)
        self._context.term()  # ends the replay thread's recv
        if self._thread is not None:
            self._thread.join()

    def _open(self) -> None:
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        router = self._context.socket(zmq.ROUTER) if self.replay_endpoint is not None else None
        self._thread: threading.Thread | None = None
        try:
            self.endpoint = _bind(self._pub, self.endpoint)
            if router is not None and self.replay_endpoint is not None:
                router.setsockopt(zmq.SNDHWM, 0)
                self.replay_endpoint = _bind(router, self.replay_endpoint)
        except zmq.ZMQError:  # the port is in use
            self._context.destroy(linger=0)
            raise
        if router is not None:
            self._thread = threading.Thread(target=self._serve_replays, args=(router,), daemon=True)
            self._thread.start()

    def _frames(self, sequence: bytes, payload: bytes) -> list[bytes]:
        return [self.topic.encode(), sequence, payload]

    def _serve_replays(self, router: zmq.Socket[bytes]) -> None:
        try:
            while True:
                client, _, start = router.recv_multipart()
                for frames in self._replayed(int.from_bytes(start, "big")):
                    router.send_multipart([client, b"", *frames])
        except zmq.ContextTerminated:
            pass
        finally:
            router.close(linger=0)

    def _replayed(self, start: int) -> list[list[bytes]]:
        with self._lock:
            batches = [(number, payload) for number, payload in self._buffer if number >= start]
        messages = [self._frames(number.to_bytes(8, "big"), payload) for number, payload in batches]
        return [*messages, self._frames(END_OF_REPLAY, b"")]


@contextmanager
def published(**options) -> Iterator[Publisher]:
    """A `Publisher`, closed at the end."""
    publisher = Publisher(**options)
    try:
        yield publisher
    finally:
        publisher.close()


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    socket.bind(endpoint)
    return socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
