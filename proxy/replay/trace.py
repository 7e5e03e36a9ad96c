"""Traces: requests with their times, lengths and block hashes, and no text.

Formats: Mooncake's jsonl (`timestamp` in ms, `input_length`, `output_length`, `hash_ids`, 512 tokens a
    block),
the same with `session_id`, and kvpin's own recordings, which add `block_tokens`. Plain or gzip.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

from proxy.core.index.blocks import BlockHash, Chain

# Mooncake's, for lines without `block_tokens`.
BLOCK_TOKENS = 512
_ERROR_STATUS = 400
# The client left before its answer, but an engine still worked on the request.
_LEFT_STATUS = 499
_HASHES = 1 << 64

_Count = Annotated[int, msgspec.Meta(ge=0)]


class TraceError(Exception):
    """The trace cannot be replayed; the message says where and why."""


class TraceLine(msgspec.Struct, omit_defaults=True):
    """One line of a trace file: a request.

    Attributes:
        timestamp: its arrival in milliseconds since the recording began.
        hash_ids: one id per full block; it stands for that block and all before it. One more, for a tail that
            fills no block, may follow.
        session_id: the conversation it belongs to, if known.
        model, engine: the model and the engine that served it, if known.
        status: the HTTP status that the client got, if known.
    """

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: _Count
    hash_ids: list[_Count]
    session_id: str | int | None = None
    block_tokens: Annotated[int, msgspec.Meta(ge=1)] = BLOCK_TOKENS
    model: str | None = None
    engine: str | int | None = None
    status: int | None = None

    @property
    def failed(self) -> bool:
        """Whether the client got an error. What engines computed for it is then unknown."""
        return self.status is not None and self.status >= _ERROR_STATUS and self.status != _LEFT_STATUS


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        id: its position in the trace.
        chain: its full blocks.
        session: the conversation it belongs to; None if unknown.
    """

    id: int
    at: float
    chain: Chain
    output_tokens: int
    session: str | None = None

    @property
    def n_tokens(self) -> int:
        """Prompt tokens."""
        return self.chain.n_tokens


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of arrival, and what is true of all of them.

    Attributes:
        tokens_per_block: the same for all of them.
        common_blocks: leading blocks that all of them share, as of one system prompt.
        engines: engines that served them, as the file names them; 0 if it names none.
        rechained: the file's ids stood for a block alone; they were chained when it was read.
        failed: requests of the file that got an error; they are left out.
        cut: the last line of the file was incomplete; it is left out.
    """

    name: str
    requests: tuple[TraceRequest, ...]
    tokens_per_block: int
    common_blocks: int
    engines: int = 0
    rechained: bool = False
    failed: int = 0
    cut: bool = False

    @property
    def n_tokens(self) -> int:
        """Prompt tokens in all."""
        return sum(request.n_tokens for request in self.requests)

    @property
    def has_sessions(self) -> bool:
        """Whether it says which requests belong together."""
        return any(request.session is not None for request in self.requests)


def _opened(path: Path) -> BinaryIO:
    return path.open("rb")


def read_trace(
    path: Path,
    *,
    limit: int | None = None,
    model: str | None = None,
    opened: Callable[[Path], BinaryIO] = _opened,
) -> Trace:
    """Reads a trace, or its first `limit` lines; with `model`, only the requests of that model.

    `opened` opens the file, compressed or not; it may raise OSError.

    Raises:
        TraceError: a line is wrong, or the model must be chosen; the message says which.
    """
    read = list(_lines(path, limit, opened))
    whole = [line for line in read if line is not None]
    answered = [line for line in whole if not line.failed]
    lines = _of_one_model(path, answered, model)
    if not lines:
        raise TraceError(f"{path}: holds no request" + (" that did not fail" if whole else ""))
    sizes = {line.block_tokens for line in lines}
    if len(sizes) > 1:
        raise TraceError(
            f"{path}: blocks of {' and '.join(map(str, sorted(sizes)))} tokens; replay takes one size"
        )
    size = sizes.pop()
    chains = [tuple(line.hash_ids[: line.input_length // size]) for line in lines]
    rechained = not _is_chained(chains)
    if rechained:
        chains = _chained(chains)
    order = sorted(range(len(lines)), key=lambda at: lines[at].timestamp)
    requests = tuple(
        TraceRequest(
            id=position,
            at=lines[at].timestamp / 1000,
            chain=Chain(chains[at], lines[at].input_length, size),
            output_tokens=lines[at].output_length,
            session=None if lines[at].session_id is None else str(lines[at].session_id),
        )
        for position, at in enumerate(order)
    )
    return Trace(
        path.name,
        requests,
        tokens_per_block=size,
        common_blocks=_common(chains),
        engines=len({line.engine for line in lines} - {None}),
        rechained=rechained,
        failed=len(whole) - len(answered),
        cut=len(read) > len(whole),
    )


def _of_one_model(path: Path, lines: list[TraceLine], model: str | None) -> list[TraceLine]:
    """The lines of that model; all lines if no model is given and the trace names at most one."""
    names = sorted({line.model for line in lines if line.model})
    if model is None and len(names) > 1:
        raise TraceError(
            f"{path}: holds requests of {' and '.join(names)}; choose one: --model-name {names[0]}"
        )
    if model is not None and model not in names:
        there_are = f"there are {' and '.join(names)}" if names else "its lines name no model"
        raise TraceError(f"{path}: holds no request of the model {model!r}; {there_are}")
    return lines if model is None else [line for line in lines if line.model == model]


def _lines(path: Path, limit: int | None, opened: Callable[[Path], BinaryIO]) -> Iterator[TraceLine | None]:
    """Yields the lines of a file; None in place of an incomplete last line."""
    decoder = msgspec.json.Decoder(TraceLine)
    at = 0
    try:
        with opened(path) as packed, gzip.open(packed) if path.suffix == ".gz" else packed as file:
            filled = ((number, text) for number, text in enumerate(file, 1) if not text.isspace())
            for at, text in islice(filled, limit):  # noqa: B007 - names the line in an error
                yield _checked(decoder.decode(text)) if text.endswith(b"\n") else _last(decoder, text)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise TraceError(f"{path}: is incomplete or damaged: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise TraceError(f"{path}, line {at}: {error}") from error


def _last(decoder: msgspec.json.Decoder[TraceLine], text: bytes) -> TraceLine | None:
    """A last line without a newline: whole, or None if its writer was killed while writing it."""
    try:
        return _checked(decoder.decode(text))
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        return None


def _checked(line: TraceLine) -> TraceLine:
    """Raises ValueError for a line that contradicts itself."""
    full = line.input_length // line.block_tokens
    if len(line.hash_ids) < full:
        raise ValueError(
            f"{len(line.hash_ids)} hash_ids for {full} full blocks of {line.block_tokens} tokens"
        )
    if line.hash_ids and max(line.hash_ids) >= _HASHES:
        raise ValueError("a hash id has more than 64 bits")
    return line


def _is_chained(chains: Iterable[tuple[BlockHash, ...]]) -> bool:
    """Whether each id always follows the same id."""
    parents: dict[BlockHash, BlockHash] = {}
    for chain in chains:
        parent = -1
        for block in chain:
            if parents.setdefault(block, parent) != parent:
                return False
            parent = block
    return True


def _chained(chains: Iterable[tuple[BlockHash, ...]]) -> list[tuple[BlockHash, ...]]:
    """The same chains with a new id for each block after each prefix."""
    ids: dict[tuple[BlockHash, BlockHash], BlockHash] = {}
    chained = []
    for chain in chains:
        parent, here = -1, []
        for block in chain:
            parent = ids.setdefault((parent, block), len(ids))
            here.append(parent)
        chained.append(tuple(here))
    return chained


def _common(chains: Iterable[tuple[BlockHash, ...]]) -> int:
    """Leading blocks that all chains share. Equal ids mean equal prefixes, so one comparison per chain
    suffices."""
    chains = list(chains)
    common = min(map(len, chains))
    while common and any(chain[common - 1] != chains[0][common - 1] for chain in chains):
        common -= 1
    return common
