"""Frames between kvpins of several machines, through a channel of Redis or Valkey.

A channel carries a message to the present listeners and keeps none. While the server is gone, this kvpin
works alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import structlog
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from proxy.peers.bus import BusCallbacks
from proxy.runtime import until

log = structlog.get_logger(__name__)

# The most bytes that wait while the server is slow. The server itself cuts off readers at 32 MB.
OUTBOX_BYTES = 16 * 2**20
_RETRY_S = 1.0
# A server that does not answer for that long is gone.
_TIMEOUT_S = 2.0
_POLL_S = 0.5
_CLOSE_S = 0.5


class RedisBus:
    """Carries frames through a channel of a server, see `Bus`. Whoever can use the channel reads and writes
    them. Only other workers reach `http_socket`."""

    def __init__(
        self,
        url: str,
        namespace: str,
        http_socket: Path | None = None,
        siblings: Collection[str] = (),
        secret: bytes = b"",
    ) -> None:
        """Kvpins of one `namespace` hear each other. `siblings`: where the other workers serve HTTP.
        `secret`: the group's, for a server that lost it. Raises ValueError if the URL cannot be used."""
        self.dropped, self.is_private = 0, False
        self.http_socket, self._siblings = http_socket, siblings
        self._url, self._channel = url, f"kvpin:{namespace}"
        self._key = f"{self._channel}:engines"
        self._secret = secret
        parse_url(url)
        self._kept: bytes | None = None  # it waits to be kept
        self._outbox = deque[bytes]()
        self._waiting_bytes = 0
        self._has_waiting = asyncio.Event()
        self.is_connected = self._is_alone = False
        self._has_complained = self._is_refused = False

    def _client(self) -> Any:  # noqa: ANN401 - redis has no types for the asynchronous client
        never = Retry(NoBackoff(), 0)
        return Redis.from_url(
            self._url,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            retry=never,
            single_connection_client=True,
        )

    @property
    def is_alone(self) -> bool:
        """True if nobody else listens to the channel."""
        return self.is_connected and self._is_alone

    def reaches(self, socket: str) -> bool:
        """True if the path is another worker's. Kvpins of other machines also announce paths."""
        return socket in self._siblings

    def publish(self, frame: bytes) -> None:
        """Sends a frame soon. It is dropped while the server is gone, and where too much is waiting."""
        if not self.is_connected:
            return
        if self._waiting_bytes + len(frame) > OUTBOX_BYTES:
            self.dropped += 1
            return
        self._outbox.append(frame)
        self._waiting_bytes += len(frame)
        self._has_waiting.set()

    def keep(self, data: bytes) -> None:
        """Leaves data in a key of the namespace."""
        self._kept = data
        self._has_waiting.set()

    async def run(self, callbacks: BusCallbacks) -> None:
        """Connects, and connects again whenever the server was gone."""
        while True:
            try:
                await self._serve(callbacks)
            # uvloop raises RuntimeError where the server closes the connection in mid-handshake.
            except* (RedisError, OSError, RuntimeError) as errors:
                if not self._has_complained:
                    self._has_complained = True
                    reason = str(_first(errors)) or "no answer in time"
                    log.warning(
                        "the exchange is gone: this kvpin goes on alone until it is back", error=reason
                    )
            finally:
                self.is_connected = False
                self._outbox.clear()
                self._has_waiting.clear()
                self._waiting_bytes = 0
            _end_if_cancelled()
            await asyncio.sleep(_RETRY_S)

    async def _serve(self, callbacks: BusCallbacks) -> None:
        """Carries frames over one connection for each direction, until one of them breaks."""
        sender, receiver = self._client(), self._client()
        try:
            channel = receiver.pubsub(ignore_subscribe_messages=True)
            await channel.subscribe(self._channel)
            ((_, listeners),) = await sender.pubsub_numsub(self._channel)
            self._is_alone = listeners <= 1
            kept: bytes | None = None
            try:
                kept = await sender.get(self._key)
            except ResponseError as error:
                self._refuse(error)
            if self._secret:
                with suppress(ResponseError):  # a user that may not: kvpin warned of that when it started
                    await sender.set(f"{self._channel}:secret", self._secret, nx=True)
            _end_if_cancelled()
            # Python 3.11's own group would leave this task marked as cancelled when the server goes.
            async with anyio.create_task_group() as group:
                group.start_soon(self._send, sender)
                group.start_soon(self._listen, channel, callbacks)
                self.is_connected = True
                if self._has_complained:
                    self._has_complained = False
                    log.info("the exchange is back")
                callbacks.kept(kept)
                callbacks.joined()
        finally:
            await sender.aclose()
            await receiver.aclose()

    async def _send(self, client: Any) -> None:  # noqa: ANN401 - likewise
        while True:
            await self._has_waiting.wait()
            self._has_waiting.clear()
            data, self._kept = self._kept, None
            if data is not None:
                try:
                    await client.set(self._key, data)
                except ResponseError as error:
                    self._refuse(error)
                _end_if_cancelled()
            frames = [*self._outbox]
            self._outbox.clear()
            if not frames:
                continue
            pipeline = client.pipeline(transaction=False)
            for frame in frames:
                pipeline.publish(self._channel, frame)
            listeners = await pipeline.execute()
            _end_if_cancelled()
            self._waiting_bytes -= sum(map(len, frames))
            self._is_alone = listeners[-1] <= 1

    def _refuse(self, error: ResponseError) -> None:
        """The server does not keep data for this user: says so, once."""
        if not self._is_refused:
            self._is_refused = True
            log.warning(
                "orders about engines are not kept in Redis: let kvpin's user get and set the key",
                key=self._key,
                error=str(error),
            )

    async def _listen(self, channel: PubSub, callbacks: BusCallbacks) -> None:
        while True:
            message = await channel.get_message(timeout=_POLL_S)
            _end_if_cancelled()
            if message is not None:
                callbacks.receive(message["data"])

    async def aclose(self) -> None:
        """Waits until the server has what was published, but not for long."""
        await until(lambda: not (self.is_connected and (self._waiting_bytes or self._kept)), _CLOSE_S)


def _end_if_cancelled() -> None:
    """Ends the task if it was cancelled: redis may answer a call in which that happened as if it had not."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _first(errors: BaseExceptionGroup[Exception]) -> BaseException:
    """The first error of a group that may hold groups."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
