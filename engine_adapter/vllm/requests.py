"""Changes to a client's request: token ids for text, embeddings, and questions whose answers the client
does not see."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import math
import pickletools
import zipfile
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from engine_adapter.body import JsonBody
from engine_adapter.detect import release_of
from engine_adapter.errors import EngineRejected
from engine_adapter.hold import Hold
from engine_adapter.http.openai_answer import hold_openai
from engine_adapter.off_loop import off_loop
from engine_adapter.types import KvTarget, RenderedPrompt, TokenIds
from engine_adapter.vllm.prompts import RENDERED_ROUTES

# --- reads one tensor that `torch.save` wrote, without running its pickle -------------------------------
# Such a file is a zip archive: a pickle says what the tensor is like, and another entry holds its bytes.
# The pickle of a plain dense tensor always has the same instructions. They are compared, never carried out:
# a file with any other instruction is not read.

# Bytes of each element, by the name of the storage.
_SIZES = {
    "torch DoubleStorage": 8,
    "torch FloatStorage": 4,
    "torch HalfStorage": 2,
    "torch BFloat16Storage": 2,
}
_PICKLE = "/data.pkl"
_PICKLE_BYTES = 4096  # a plain tensor's has about 150
_MEMO = frozenset({"PROTO", "BINPUT", "LONG_BINPUT"})
_INT = frozenset({"BININT", "BININT1", "BININT2", "LONG1"})
_FAULTS = (zipfile.BadZipFile, NotImplementedError, OSError, EOFError, ValueError, KeyError, RuntimeError)


class NotPlainTensor(ValueError):
    """The file is not a dense tensor of floating-point numbers as `torch.save` writes it today."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor of two dimensions."""

    count: int
    row_bytes: int
    values: memoryview = field(repr=False)


def read_rows(content: bytes) -> Rows:
    """The rows of a 2-d tensor, or of a 3-d tensor with one entry in its first dimension. Raises
    NotPlainTensor if it is something else, or its rows do not lie one after another."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return _read(archive)
    except _FAULTS as error:
        raise NotPlainTensor(str(error)) from error


def _read(archive: zipfile.ZipFile) -> Rows:
    pickles = [entry for entry in archive.infolist() if entry.filename.endswith(_PICKLE)]
    if len(pickles) != 1:
        raise NotPlainTensor("it has no pickle, or several")
    folder = pickles[0].filename.removesuffix(_PICKLE)
    storage, key, offset, shape, strides = _layout(_stored(archive, pickles[0], _PICKLE_BYTES))
    order = f"{folder}/byteorder"
    if order in archive.namelist() and _stored(archive, archive.getinfo(order), len("little")) != b"little":
        raise NotPlainTensor("its numbers are big-endian")
    if len(shape) == 3 and shape[0] == 1:  # noqa: PLR2004 - a batch of one
        shape, strides = shape[1:], strides[1:]
    if len(shape) != 2 or 0 in shape or strides != (shape[1], 1):  # noqa: PLR2004 - rows and columns
        raise NotPlainTensor("its rows do not lie one after another")
    size = _SIZES[storage]
    entry = archive.getinfo(f"{folder}/data/{key}")
    values = memoryview(_stored(archive, entry, entry.compress_size))
    first, length = offset * size, math.prod(shape) * size
    if first < 0 or first + length > len(values):
        raise NotPlainTensor("it is larger than its storage")
    return Rows(shape[0], shape[1] * size, values[first : first + length])


def _stored(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, most: int) -> bytes:
    """The bytes of an entry. `torch.save` compresses none, so that none takes more memory than the file."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > most:
        raise NotPlainTensor(f"{entry.filename} is compressed, or too large")
    return archive.read(entry)


def _layout(pickle: bytes) -> tuple[str, str, int, tuple[int, ...], tuple[int, ...]]:
    """Storage class and key, offset, shape and strides, in elements, from a tensor's pickle."""
    steps = [
        ("INT" if op.name in _INT else op.name, argument)
        for op, argument, _ in pickletools.genops(pickle)
        if op.name not in _MEMO
    ]
    match steps:
        case [
            ("GLOBAL", "torch._utils _rebuild_tensor_v2"),
            ("MARK", None),
            ("MARK", None),
            ("BINUNICODE", "storage"),
            ("GLOBAL", str(storage)),
            ("BINUNICODE", str(key)),
            ("BINUNICODE", _),
            ("INT", _),
            ("TUPLE", None),
            ("BINPERSID", None),
            ("INT", int(offset)),
            *numbers,
            ("NEWFALSE" | "NEWTRUE", None),
            ("GLOBAL", "collections OrderedDict"),
            ("EMPTY_TUPLE", None),
            ("REDUCE", None),
            ("TUPLE", None),
            ("REDUCE", None),
            ("STOP", None),
        ]:
            return storage, key, offset, *_shape(numbers)
        case _:
            raise NotPlainTensor("it is no plain tensor")


def _shape(steps: list[tuple[str, object]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides: the integers of each, and then how many these are."""
    n = len(steps) // 2 - 1
    made = [("INT", argument) for _, argument in steps[:n]] + [(f"TUPLE{n}", None)]
    made += [("INT", argument) for _, argument in steps[n + 1 : -1]] + [(f"TUPLE{n}", None)]
    if steps != made:
        raise NotPlainTensor("it is no plain tensor")
    numbers = [int(str(argument)) for name, argument in steps if name == "INT"]
    return tuple(numbers[:n]), tuple(numbers[n:])


# --- prompts with embeddings, as vLLM identifies them ---------------------------------------------------
# vLLM keys each block of such a prompt, also one of text, by the hash of its rows of embeddings. The row of
# a text token is all zeros, and the token id of an embedding is 0. vLLM converts rows to the model's number
# type before it hashes them. kvpin does not: of rows in another type, it finds nothing.

_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_KIND = "prompt_embeds"
_QUOTED = b'"prompt_embeds"'
# The text that vLLM puts in place of embeddings in a chat. It refuses the same text from clients.
_IN_ITS_PLACE = JsonBody(b'{"prompt": "<prompt_embeds>", "add_special_tokens": false}')
# Bytes of a body that are decoded and hashed in about 1 ms.
_BYTES_PER_MS = 256 * 1024

_TokenRows = Sequence[memoryview | None]
"""For each token its row of embeddings, None for text."""


class _Part(msgspec.Struct, frozen=True):
    """A part of a message, with the embeddings that it holds."""

    type: str | None = None
    data: str | None = None


class _Message(msgspec.Struct, frozen=True):
    content: str | list[_Part] | None = None


def has_embeddings(path: str, body: JsonBody) -> bool:
    """True if its prompt has embeddings."""
    if path == _COMPLETIONS:
        return body.get(_KIND) is not None
    return path == _CHAT and _QUOTED in body.raw and any(True for _ in _in_messages(body))


async def render(
    path: str, body: JsonBody, *, block: int, tokenize: Callable[[str, JsonBody], Awaitable[TokenIds[int]]]
) -> RenderedPrompt:
    """The prompt of a request with embeddings.

    `block` is the number of tokens in a block of the server's cache. `tokenize` asks the server for the token
    ids of a request. Raises EngineRejected if the server refuses it, or if its prompt is not known here."""
    ms = len(body.raw) / _BYTES_PER_MS
    if path == _COMPLETIONS:
        return await off_loop(lambda: _completion(body, block), ms=ms)
    token_ids, stands_for = await asyncio.gather(tokenize(path, body), tokenize(_COMPLETIONS, _IN_ITS_PLACE))
    return await off_loop(lambda: _chat(body, token_ids, stands_for, block), ms=ms)


def _completion(body: JsonBody, block: int) -> RenderedPrompt:
    given = body.get(_KIND)
    if isinstance(given, list) and len(given) == 1:
        given = given[0]
    if not isinstance(given, str) or body.get("prompt") is not None:
        raise _unknown("the request has several prompts")
    rows = _rows(given)
    ids = array("i", bytes(4 * rows.count))
    return RenderedPrompt(ids, embeds=tuple(_digests([*_each(rows)], block)))


def _chat(body: JsonBody, token_ids: TokenIds[int], stands_for: TokenIds[int], block: int) -> RenderedPrompt:
    tensors = [_rows(data) for data in _in_messages(body)]
    rows = [row for each in tensors for row in _each(each)]
    is_row = [[token] == stands_for.tolist() for token in token_ids]
    if sum(is_row) != len(rows) or len({each.row_bytes for each in tensors}) != 1:
        raise _unknown("its embeddings do not lie where the prompt has room for them")
    following = iter(rows)
    of_tokens = [next(following) if it_is else None for it_is in is_row]
    ids = array("i", (0 if it_is else token for it_is, token in zip(is_row, token_ids, strict=True)))
    return RenderedPrompt(ids, embeds=tuple(_digests(of_tokens, block)))


def _digests(rows: _TokenRows, block: int) -> Iterator[tuple[int, bytes]]:
    """First token and digest of each block; the last one may be shorter."""
    of_text = bytes(next((len(row) for row in rows if row is not None), 0))
    known: dict[int, bytes] = {}  # digests of blocks of text, by length
    for start in range(0, len(rows), block):
        of_block = rows[start : start + block]
        if any(row is not None for row in of_block):
            yield start, _digest(of_block, of_text)
            continue
        if len(of_block) not in known:
            known[len(of_block)] = _digest(of_block, of_text)
        yield start, known[len(of_block)]


def _digest(rows: _TokenRows, of_text: bytes) -> bytes:
    return hashlib.sha256(b"".join(of_text if row is None else row for row in rows)).digest()


def _each(rows: Rows) -> Iterator[memoryview]:
    for start in range(0, rows.count * rows.row_bytes, rows.row_bytes):
        yield rows.values[start : start + rows.row_bytes]


def _in_messages(body: JsonBody) -> Iterator[str]:
    """The embeddings of a chat, as they stand in its parts."""
    try:
        messages = msgspec.convert(body.get("messages"), list[_Message])
    except msgspec.ValidationError:
        return
    for message in messages:
        for part in message.content if isinstance(message.content, list) else ():
            if part.type == _KIND and part.data:
                yield part.data


def _rows(data: str) -> Rows:
    try:
        return read_rows(base64.b64decode(data, validate=True))
    except ValueError as error:
        raise _unknown(f"its embeddings cannot be read here: {error}") from error


def _unknown(why: str) -> EngineRejected:
    return EngineRejected(why, status=400, param=_KIND)


# --- requests -------------------------------------------------------------------------------------------

# With these fields, vLLM does more with a text than tokenise it, or returns it.
_TEXT_STAYS = (
    "add_special_tokens", "echo", "prompt_embeds", "prompt_logprobs", "suffix", "truncate_prompt_tokens",
    "truncation_side",
)  # fmt: skip
# Likewise in chats; the first of these already carries ids, or names another server's KV.
_CHAT_STAYS = (
    "kv_transfer_params", "echo", "prompt_embeds", "prompt_logprobs", "return_prompt_text",
    "return_token_offsets", "truncate_prompt_tokens", "truncation_side", "use_beam_search",
)  # fmt: skip
# Chats' prompts may depend on the choice among tools, which `/tokenize` does not read: a server that has no
# `/render` did not prove their ids.
_ONLY_RENDERED = ("tools", "tool_choice")
_CHATS_TAKE_IDS_SINCE = (0, 27)


class RequestShaper:
    """Shapes the requests of one connection.

    Args:
        asks_usage: ask streams for their reused tokens.
        longest_chat: tokens of the longest chat that may go as token ids; 0 for none.
        renders: the server has `/render`.
    """

    def __init__(self, *, asks_usage: bool, longest_chat: int = 0, renders: bool = True) -> None:
        self._asks_usage, self._longest_chat = asks_usage, longest_chat
        self._chat_stays = _CHAT_STAYS if renders else (*_CHAT_STAYS, *_ONLY_RENDERED)

    def hold(self, path: str, body: JsonBody, prompt: KvTarget | None, *, tell_reuse: bool) -> Hold:
        """The hold of a request; `tell_reuse`: ask the engine to report reused blocks."""
        if path not in RENDERED_ROUTES:
            return Hold(body)
        changes: dict[str, object] = {}
        given = body.get("vllm_xargs") if tell_reuse else None
        if tell_reuse and (given is None or isinstance(given, dict)):  # the engine refuses anything else
            changes["vllm_xargs"] = {"kv_cache_report_mode": "full", **(given or {})}
        ask_tokens = prompt is not None and prompt.audit
        if prompt is not None and not ask_tokens:
            changes |= self._ids_for_text(path, body, prompt)
        hold = hold_openai(path, body, changes=changes, ask_usage=self._asks_usage, ask_tokens=ask_tokens)
        if computes_all(path, body):
            hold.cached_tokens = 0
        if body.hint("n") not in (None, 1) and body.get("stream") is not True:
            hold.firm = False  # what vLLM reports is the reuse of the choice that ended last
        return hold

    def _ids_for_text(self, path: str, body: JsonBody, prompt: KvTarget) -> dict[str, object]:
        """The prompt as token ids, so that the engine need not tokenise it again."""
        ids = prompt.token_ids
        if not ids or not prompt.exact or prompt.extra_ids is not None:
            return {}
        if path == _COMPLETIONS:
            is_text = isinstance(body.get("prompt"), str) and not any(name in body for name in _TEXT_STAYS)
            return {"prompt": ids.tolist()} if is_text else {}
        fits = path == _CHAT and len(ids) <= self._longest_chat
        if not fits or any(name in body for name in self._chat_stays):
            return {}
        return {"kv_transfer_params": {"prompt_token_ids": ids.tolist()}}


def longest_chat(version: str, max_model_len: int | None) -> int:
    """Tokens of the longest chat that a vLLM of this version takes as token ids (vLLM #48145); 0 for none.

    vLLM does not check their number: a chat that leaves no room for an answer goes as text, and is refused.
    """
    if max_model_len is None or release_of(version) < _CHATS_TAKE_IDS_SINCE:
        return 0
    return max_model_len - 1


def computes_all(path: str, body: JsonBody) -> bool:
    """True if vLLM computes the whole prompt, whatever it holds: prompt logprobs need that."""
    if body.get("prompt_logprobs") is not None:
        return True
    return path == _COMPLETIONS and bool(body.get("echo")) and body.get("logprobs") is not None
