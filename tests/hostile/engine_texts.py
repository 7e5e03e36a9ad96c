"""What the engines of hostile trials say, for those who send and those who read."""

SECRET = "s3cret-of-the-engine"
"""Stands in what a broken engine says, and must be nowhere else."""
BROKEN_HEADS = {
    "no head": f"{SECRET}\r\n\r\n",
    "no status": f"HTTP/1.1 {SECRET}\r\n\r\n",
    "a field without a name": f"HTTP/1.1 200 OK\r\n{SECRET}\r\n\r\n",
    "an odd length": f"HTTP/1.1 200 OK\r\ncontent-length: {SECRET}\r\n\r\n",
    "status 099": f"HTTP/1.1 099 {SECRET}\r\n\r\n",
    "status 600": f"HTTP/1.1 600 {SECRET}\r\n\r\n",
    "an odd chunk": f"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{SECRET}\r\n",
    "half an answer": "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
    f"content-length: 999\r\n\r\n{SECRET}",
    "a head without end": "HTTP/1.1 200 OK\r\n" + f"x: {SECRET}\r\n" * 100_000,
}
"""Beginnings of answers that are none, by what is wrong with them."""


def text_of(prompt: str) -> str:
    """What the well engine answers to a prompt."""
    return f"you said {prompt[-40:]}"
