"""Publishes KV events over ZMQ as vLLM does: a PUB socket, and a ROUTER that replays recent batches."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from socket import SOCK_STREAM, getaddrinfo

import zmq

from engine_adapter.errors import EngineSpecError
from engine_adapter.events.wire import encode_batch
from engine_adapter.types import KvEvent

BUFFER_STEPS = 10_000
HIGH_WATER_MARK = 100_000
TOPIC = "kv-events"
END_OF_REPLAY = b"\xff" * 8


@dataclass(frozen=True, slots=True)
class EventSource:
    """The sockets of one engine rank, as `GET /kv_event_sources` answers them: the addresses of the PUB and
    the ROUTER, the batches kept for replay and queued for a slow subscriber, the first frame of messages."""

    endpoint: str
    replay_endpoint: str
    buffer_steps: int
    hwm: int
    topic: str


class EventPublisher:
    """Numbers, sends and keeps batches of events. Only the engine's thread calls `publish`. A second thread
    answers replay requests, so that a late reader never delays a step. Any thread may call `close` once the
    engine has stopped."""

    def __init__(self, *, host: str = "127.0.0.1", buffer_steps: int = BUFFER_STEPS) -> None:
        self._context = zmq.Context()
        self._context.setsockopt(zmq.IPV6, 1)
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._pub.setsockopt(zmq.LINGER, 0)
        self._router = self._context.socket(zmq.ROUTER)
        # The buffer bounds a replay. No limit here: a dropped end mark would leave the reader waiting.
        self._router.setsockopt(zmq.SNDHWM, 0)
        self._router.setsockopt(zmq.LINGER, 0)
        self.source = EventSource(
            endpoint=_bind(self._pub, host),
            replay_endpoint=_bind(self._router, host),
            buffer_steps=buffer_steps,
            hwm=HIGH_WATER_MARK,
            topic=TOPIC,
        )
        self._topic = TOPIC.encode()
        self.last_sequence = -1  # number of the last published batch
        self._lock = threading.Lock()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._thread = threading.Thread(target=self._serve_replays, name="kv-event-replay", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Sends `events` as one batch; an empty list sends nothing. Never waits for a reader."""
        if not events:
            return
        payload = encode_batch(events, timestamp=time.time())
        with self._lock:
            sequence = self.last_sequence = self.last_sequence + 1
            self._buffer.append((sequence, payload))
        self._pub.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload))

    def close(self) -> None:
        """Closes both sockets and ends the replay thread. A second call does nothing."""
        if self._pub.closed:
            return
        self._pub.close()
        self._context.term()  # ends the replay thread's recv
        self._thread.join()

    def _serve_replays(self) -> None:
        try:
            while True:
                self._answer(self._router.recv_multipart())
        except zmq.ContextTerminated:
            pass
        finally:
            self._router.close()

    def _answer(self, frames: list[bytes]) -> None:
        """Replays from the requested sequence number on. A malformed request gets no answer."""
        if len(frames) != 3 or len(frames[2]) != 8:  # noqa: PLR2004 - identity, empty, sequence
            return
        start = int.from_bytes(frames[2], "big")
        with self._lock:
            first = self.last_sequence + 1 - len(self._buffer)
            skip = min(max(0, start - first), len(self._buffer))
            wanted = list(islice(self._buffer, skip, None))
        for sequence, payload in wanted:
            self._router.send_multipart((frames[0], b"", self._topic, sequence.to_bytes(8, "big"), payload))
        self._router.send_multipart((frames[0], b"", self._topic, END_OF_REPLAY, b""))


def _bind(socket: zmq.Socket[bytes], host: str) -> str:
    """Binds to a free port of `host` (a name or an address); returns the ZMQ address. Raises EngineSpecError
    if this machine does not have that address."""
    try:
        address = str(getaddrinfo(host, None, type=SOCK_STREAM)[0][4][0])
        at = f"tcp://[{address}]" if ":" in address else f"tcp://{address}"
        return f"{at}:{socket.bind_to_random_port(at)}"
    except (OSError, zmq.ZMQError) as error:
        raise EngineSpecError(f"cannot publish events on {host}: {error}") from error
