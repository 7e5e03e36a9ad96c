"""The HTTP/1.1 server protocol: uvicorn's, with a fix for clients that offer an upgrade."""

from __future__ import annotations

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class Http1Protocol(HttpToolsProtocol):
    """Ignores offers to upgrade to another protocol.

    Java's HttpClient offers h2c with every request. The parser stops at the offer and leaves the body unread.
    Such a request is parsed a second time, without the offer.
    """

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline(data[offer.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def on_headers_complete(self) -> None:
        """See HttpToolsProtocol. A request with an offer begins when it is parsed the second time."""
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """See `on_headers_complete`."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _decline(self, rest: bytes) -> None:
        """Parses the request again, without its offer. `rest`: the bytes after its head."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            self.send_400_response("CONNECT is not served.")
            return
        head = [method, b" ", self.url, b" HTTP/", version, b"\r\n"]
        for name, value in self.headers:
            if name != b"upgrade":
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join([*head, b"\r\n", rest]))
