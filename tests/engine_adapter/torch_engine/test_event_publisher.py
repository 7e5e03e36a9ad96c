"""The publisher, seen by a plain ZMQ client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from engine_adapter.torch_engine.event_publisher import EventPublisher
from engine_adapter.types import BlocksRemoved, Tier
from tests.kv_batches import decode_batch

WAIT_MS = 10_000


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    publisher = EventPublisher(buffer_steps=4)
    yield publisher
    publisher.close()
    publisher.close()


@pytest.fixture
def dealer(publisher) -> Iterator[zmq.Socket]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(publisher.source.replay_endpoint)
        yield socket


def removed(name: int) -> BlocksRemoved:
    return BlocksRemoved(Tier.GPU, (name,))


def replay(socket: zmq.Socket, start: int) -> list[list[bytes]]:
    socket.send_multipart((b"", start.to_bytes(8, "big")))
    answers = []
    while (frames := socket.recv_multipart())[2] != b"\xff" * 8:
        answers.append(frames)
    return answers


def test_replay_from_any_point(publisher, dealer):
    assert replay(dealer, 0) == []
    for name in range(3):
        publisher.publish([removed(name)])
    frames = replay(dealer, 1)
    assert [(f[0], f[1].decode(), int.from_bytes(f[2], "big")) for f in frames] == [
        (b"", publisher.source.topic, 1),
        (b"", publisher.source.topic, 2),
    ]
    assert decode_batch(frames[0][3]).events == (removed(1),)
    assert replay(dealer, 3) == []
    assert replay(dealer, 2**64 - 1) == []


def test_replay_keeps_the_last_batches_and_survives_malformed_requests(publisher, dealer):
    for name in range(10):
        publisher.publish([removed(name)])
    for frames in ([b""], [b"", b"short"], [b"", b"x" * 8, b"y"], [b""] * 9):
        dealer.send_multipart(frames)
    sequences = [int.from_bytes(frames[2], "big") for frames in replay(dealer, 0)]
    assert sequences == [6, 7, 8, 9]
