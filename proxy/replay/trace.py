"""Traces: requests with their times, lengths and block hashes, and no text.

Formats: Mooncake's jsonl (`timestamp` in ms, `input_length`, `output_length`, `hash_ids`, 512 tokens a
block), the same with `session_id`, and kvpin's own recordings, which add `block_tokens` and a line about the
recording itself. Plain or gzip. Several recordings are merged by time.
"""

from __future__ import annotations

import gzip
import io
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from os.path import commonprefix
from pathlib import Path
from statistics import median_low
from typing import Annotated, Any, BinaryIO, Generic, Protocol, TypeVar

import msgspec

from proxy.core.index.blocks import BlockHash, Chain
from proxy.core.placement.rates import OWN_PACE, TYPICAL_TOKENS, on_curve

# --- recorded -------------------------------------------------------------------------------------------
# The line of a recording that describes the recording: when it began, and the figures of its engines.
#
# A recording holds it again whenever more is known. The last one of a file counts.

_Positive = Annotated[float, msgspec.Meta(gt=0)]
Curve = tuple[tuple[_Positive, _Positive], ...]

# A line of a recording that begins so is no request.
HEAD = b'{"recording":'


ALL = "all"
"""The name of all rules together."""


class TextBlocks(msgspec.Struct, omit_defaults=True):
    """A prompt's text as hashes of its blocks, for `kvpin advise`; `proxy/observe/recorder.py` makes them.

    Attributes:
        ids: of its blocks; the last one is left out if it is not full.
        tools, system: blocks up to the end of the tools, and of the system prompt; 0 without any.
        changed: rule → ids after that rule; only rules that change the prompt.
    """

    ids: list[int]
    tools: int = 0
    system: int = 0
    changed: dict[str, list[int]] = {}


class RecordedEngine(msgspec.Struct, omit_defaults=True):
    """One engine as its kvpin knew it. A figure is missing where it was neither told nor measured.

    Attributes:
        gpu_tokens, host_tokens: KV that it holds on the GPU and in host memory, as it says itself.
        prefill: prompt tokens, and the seconds it takes to compute them: the points of a curve.
        samples: measurements that the curve rests on.
        interference: share that each decoding stream adds to the time of a prefill.
        restore_tok_s: tokens that it restores from host memory in a second.
        token_s: seconds from one token of an answer to the next, the median of streams.
    """

    id: str
    kind: str = ""
    model: str | None = None
    gpu_tokens: int | None = None
    host_tokens: int | None = None
    prefill: Curve = ()
    samples: int = 0
    interference: float | None = None
    restore_tok_s: _Positive | None = None
    token_s: float | None = None


class Recording(msgspec.Struct):
    """Facts about a recording.

    Attributes:
        began: when it began, in Unix time: `timestamp` 0 of its requests.
        key: equal for recordings whose ids were made with the same key.
        unrecorded: requests that engines got and the recording lacks, because their prompts are not known.
    """

    began: float
    key: str
    unrecorded: int = 0
    engines: list[RecordedEngine] = []


class RecordingLine(msgspec.Struct):
    """The line itself."""

    recording: Recording


def figures_of(engines: Iterable[RecordedEngine]) -> tuple[RecordedEngine, str]:
    """The median of each figure, as replay simulates equal engines; and a sentence if their prefill rates are
    far apart; "" if they are not. Of an engine that several kvpins recorded, the best known counts."""
    by_id = groupby(sorted(engines, key=lambda each: each.id), key=lambda each: each.id)
    known = [max(same, key=lambda each: each.samples) for _, same in by_id]
    curves = sorted((each.prefill for each in known if each.prefill), key=typical_tok_s)
    medians = dict[str, Any]()
    for name in ("gpu_tokens", "host_tokens", "interference", "restore_tok_s", "token_s"):
        if told := [value for each in known if (value := getattr(each, name)) is not None]:
            medians[name] = median_low(told)
    middle = curves[(len(curves) - 1) // 2] if curves else ()
    return RecordedEngine("median", prefill=middle, **medians), _differ(curves)


def _differ(curves: Sequence[Curve]) -> str:
    if not curves:
        return ""
    slowest, fastest = typical_tok_s(curves[0]), typical_tok_s(curves[-1])
    if fastest < slowest * OWN_PACE:
        return ""
    return (
        f"the recorded engines differ: they compute {slowest:,.0f} to {fastest:,.0f} prompt tokens/s; "
        "replay simulates equal ones of the median rate"
    )


def typical_tok_s(curve: Curve) -> float:
    """Tokens a second in prompts of `TYPICAL_TOKENS`."""
    lengths, seconds = zip(*curve, strict=True)
    return TYPICAL_TOKENS / on_curve(lengths, seconds, TYPICAL_TOKENS)


# --- trace ----------------------------------------------------------------------------------------------

# Mooncake's, for lines without `block_tokens`.
BLOCK_TOKENS = 512
_ERROR_STATUS = 400
# The client left before its answer, but an engine still worked on the request.
_LEFT_STATUS = 499
_HASHES = 1 << 64
# Bytes of one line, and bytes that a packed file may unpack to, for each of its own. Recordings of hashes
# unpack to less than 20.
_MOST_LINE = 64 << 20
_MOST_UNPACKED = 200

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
        ttft_ms: from placement to the first byte, for streams.
        queued_ms: wait for an engine before that, if there was one.
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
    ttft_ms: float | None = None
    queued_ms: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Measured seconds to the first byte."""
        return None if self.ttft_ms is None else (self.ttft_ms + (self.queued_ms or 0.0)) / 1000

    def check(self) -> None:
        """Raises ValueError for a line that contradicts itself."""
        full = self.input_length // self.block_tokens
        if len(self.hash_ids) < full:
            raise ValueError(
                f"{len(self.hash_ids)} hash_ids for {full} full blocks of {self.block_tokens} tokens"
            )
        if self.hash_ids and max(self.hash_ids) >= _HASHES:
            raise ValueError("a hash id has more than 64 bits")

    @property
    def failed(self) -> bool:
        """True if the client got an error. What engines computed for it is then unknown."""
        return self.status is not None and self.status >= _ERROR_STATUS and self.status != _LEFT_STATUS


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        id: its position in the trace.
        chain: its full blocks.
        session: the conversation it belongs to; None if unknown.
        ttft_s: its measured time to first token, of a recorded stream.
        answer: blocks after its chain that its answer completes, where a recording tells them.
    """

    id: int
    at: float
    chain: Chain
    output_tokens: int
    session: str | None = None
    ttft_s: float | None = None
    answer: tuple[BlockHash, ...] = ()

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
        figures: those of the median engine, as far as they were recorded.
        differ: a sentence if the recorded engines' prefill rates are far apart; "" if they are not.
        unrecorded: requests of the same time whose prompts were not known.
        rechained: the file's ids stood for a block alone; they were chained when it was read.
        failed: requests of the file that got an error; they are left out.
        cut: the last line of the file was incomplete; it is left out.
    """

    name: str
    requests: tuple[TraceRequest, ...]
    tokens_per_block: int
    common_blocks: int
    engines: int = 0
    figures: RecordedEngine = RecordedEngine("median")  # noqa: RUF009 - nobody changes it
    differ: str = ""
    unrecorded: int = 0
    rechained: bool = False
    failed: int = 0
    cut: bool = False

    @property
    def n_tokens(self) -> int:
        """Prompt tokens in all."""
        return sum(request.n_tokens for request in self.requests)

    @property
    def has_sessions(self) -> bool:
        """True if it says which requests belong together."""
        return any(request.session is not None for request in self.requests)


def _opened(path: Path) -> BinaryIO:
    return path.open("rb")


@contextmanager
def texts_of(path: Path, opened: Callable[[Path], BinaryIO] = _opened) -> Iterator[Iterator[bytes]]:
    """The lines of a file that are not empty. Raises TraceError, also for a line that cannot be decoded
    within."""
    at, most = 0, math.inf

    def texts(file: BinaryIO | gzip.GzipFile) -> Iterator[bytes]:
        nonlocal at
        left = most
        for at, text in enumerate(iter(partial(file.readline, _MOST_LINE + 1), b""), 1):  # noqa: B007 - for errors
            left -= len(text)
            if len(text) > _MOST_LINE:
                raise ValueError(f"is longer than {_MOST_LINE >> 20} MiB")
            if left < 0:
                raise ValueError(f"the file unpacks to more than {_MOST_UNPACKED} times its size")
            if not text.isspace():
                yield text

    try:
        with opened(path) as packed:
            if path.suffix != ".gz":
                yield texts(packed)
                return
            most = max(_MOST_UNPACKED * packed.seek(0, io.SEEK_END), _MOST_LINE)
            packed.seek(0)
            with gzip.open(packed) as file:
                yield texts(file)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise TraceError(f"{path}: is incomplete or damaged: {error}") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise TraceError(f"{path}, line {at}: {error}") from error


class _Timed(Protocol):
    timestamp: float


_Line = TypeVar("_Line", bound=_Timed)


@dataclass(slots=True)
class RecordedFile(Generic[_Line]):
    """What one file holds: requests, what it says about itself last, and whether its last line breaks off."""

    lines: list[_Line]
    about: Recording | None = None
    cut: bool = False


def read_file(
    path: Path,
    kind: type[_Line],
    limit: int | None = None,
    opened: Callable[[Path], BinaryIO] = _opened,
) -> RecordedFile[_Line]:
    """Reads one file, up to its first `limit` requests. Raises TraceError."""
    decoder, about = msgspec.json.Decoder(kind), msgspec.json.Decoder(RecordingLine)
    file = RecordedFile[_Line]([])
    with texts_of(path, opened) as texts:
        for text in texts:
            is_whole = text.endswith(b"\n")
            if text.startswith(HEAD):
                file.cut = not is_whole
                file.about = about.decode(text).recording if is_whole else file.about
                continue
            try:
                line = decoder.decode(text)
            except msgspec.ValidationError:
                raise
            except msgspec.DecodeError:
                if is_whole:
                    raise
                file.cut = True  # its writer was killed while writing it
                continue
            if isinstance(line, TraceLine):
                line.check()
            file.lines.append(line)
            if len(file.lines) == limit:
                break
    return file


def read_trace(
    *paths: Path,
    limit: int | None = None,
    model: str | None = None,
    opened: Callable[[Path], BinaryIO] = _opened,
) -> Trace:
    """Reads a trace, or recordings of one time that several kvpins made; of each file its first `limit`
    lines; with `model`, only the requests of that model.

    `opened` opens a file, compressed or not; it may raise OSError. Raises TraceError, which says what, if a
    line is wrong, the model must be chosen, or the files do not belong together."""
    files = [read_file(path, TraceLine, limit, opened) for path in paths]
    path = paths[0]
    whole = merged(paths, files)
    abouts = [file.about for file in files if file.about is not None]
    answered = [line for line in whole if not line.failed]
    lines = _of_one_model(path, answered, model)
    if not lines:
        raise TraceError(f"{path}: holds no request" + (" that did not fail" if whole else ""))
    models = {line.model for line in lines}
    figures, differ = figures_of(each for about in abouts for each in about.engines if each.model in models)
    sizes = {line.block_tokens for line in lines}
    if len(sizes) > 1:
        raise TraceError(
            f"{path}: blocks of {' and '.join(map(str, sorted(sizes)))} tokens; replay takes one size"
        )
    size = sizes.pop()
    chains = [tuple(line.hash_ids[: line.input_length // size]) for line in lines]
    if rechained := not _is_chained(chains):
        chains = _chained(chains)
    requests = _requests(lines, chains, size)
    if abouts:
        found = zip(requests, answer_blocks(requests), strict=True)
        requests = tuple(replace(request, answer=answer) if answer else request for request, answer in found)
    return Trace(
        path.name if len(paths) == 1 else f"{path.name} and {len(paths) - 1} more",
        requests,
        tokens_per_block=size,
        common_blocks=len(commonprefix(chains)),  # noqa: RUF071 - of block ids
        engines=len({line.engine for line in lines} - {None}),
        figures=figures,
        differ=differ,
        unrecorded=sum(about.unrecorded for about in abouts),
        rechained=rechained,
        failed=len(whole) - len(answered),
        cut=any(file.cut for file in files),
    )


def _requests(
    lines: Sequence[TraceLine], chains: Sequence[tuple[BlockHash, ...]], size: int
) -> tuple[TraceRequest, ...]:
    """The requests in the order of arrival, from their lines and blocks."""
    order = sorted(range(len(lines)), key=lambda at: lines[at].timestamp)
    return tuple(
        TraceRequest(
            id=position,
            at=lines[at].timestamp / 1000,
            chain=Chain(chains[at], lines[at].input_length, size),
            output_tokens=lines[at].output_length,
            session=None if lines[at].session_id is None else str(lines[at].session_id),
            ttft_s=lines[at].ttft_s,
        )
        for position, at in enumerate(order)
    )


def predecessors(requests: Sequence[TraceRequest], common_blocks: int = 0) -> Iterator[int | None]:
    """Yields the position of the request that each one continues: the last of its session, or else the last
    one whose last block it contains. The first `common_blocks` do not count. None if it continues none."""
    last_of, ending = dict[str, int](), dict[BlockHash, int]()
    for at, request in enumerate(requests):
        if request.session is not None:
            before = last_of.get(request.session)
            last_of[request.session] = at
        else:
            own = request.chain.hashes[common_blocks:]
            before = next((ending[block] for block in reversed(own) if block in ending), None)
            if own:
                ending[own[-1]] = at
        yield before


def answer_blocks(requests: Sequence[TraceRequest]) -> list[tuple[BlockHash, ...]]:
    """The full blocks after the prompt that each request's answer completes, in the order of the requests;
    none where no later prompt goes on with the answer.

    The last token of an answer is never computed, so that it fills no block.
    """
    found: list[tuple[BlockHash, ...]] = [()] * len(requests)
    for request, before in zip(requests, predecessors(requests), strict=True):
        if before is not None:
            found[before] = found[before] or _between(requests[before], request.chain.hashes)
    return found


def _between(request: TraceRequest, later: Sequence[BlockHash]) -> tuple[BlockHash, ...]:
    """The blocks of a later prompt that the request's answer completes; none if it does not go on."""
    own = len(request.chain.hashes)
    full = (request.n_tokens + request.output_tokens - 1) // request.chain.tokens_per_block
    return tuple(later[own:full]) if tuple(later[:own]) == request.chain.hashes else ()


def merged(paths: Sequence[Path], files: Sequence[RecordedFile[_Line]]) -> list[_Line]:
    """The requests of all files, by the clock of the first that began. Raises TraceError if the files cannot
    be merged."""
    abouts = [(path, file.about) for path, file in zip(paths, files, strict=True)]
    begins, first = list[float](), abouts[0][1]
    for path, about in abouts if len(files) > 1 else ():
        if about is None:
            raise TraceError(f"{path}: does not say when it began, so it cannot be merged with others")
        if first is not None and about.key != first.key:
            raise TraceError(
                f"{path}: its ids were made with another key than those of {paths[0]}, which hides what "
                "requests share: let all kvpins record with the same record_traffic_key"
            )
        begins.append(about.began)
    for file, began in zip(files, begins, strict=False):
        for line in file.lines:
            line.timestamp += 1000 * (began - min(begins))
    return [line for file in files for line in file.lines]


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


def _is_chained(chains: Iterable[tuple[BlockHash, ...]]) -> bool:
    """True if each id always follows the same id."""
    parents: dict[BlockHash, BlockHash] = {}
    for chain in chains:
        parent = -1
        for block in chain:
            if parents.setdefault(block, parent) != parent:
                return False
            parent = block
    return True


def _chained(chains: Iterable[tuple[BlockHash, ...]]) -> list[tuple[BlockHash, ...]]:
    """The chains with a new id for each block after each prefix."""
    ids: dict[tuple[BlockHash, BlockHash], BlockHash] = {}
    chained = []
    for chain in chains:
        parent, here = -1, []
        for block in chain:
            parent = ids.setdefault((parent, block), len(ids))
            here.append(parent)
        chained.append(tuple(here))
    return chained
