"""Keeps answers to a structure, by llguidance: it says which tokens may come next.

llguidance bounds the time and the size of compiling and of each step. Compiling runs in a thread of its own:
a costly structure delays only requests that wait for one. Equal structures are compiled once.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from engine_adapter.prompt.chat import ChatTokenizer
from engine_adapter.torch_engine.requests import Constraint, RequestRefused
from engine_adapter.torch_engine.structure import Structure
from engine_adapter.torch_engine.web import ApiError

MAX_GRAMMARS = 64
"""Structures that are kept compiled."""
MAX_WAITING = 16
"""Structures that may wait to be compiled."""
# An answer could otherwise consist of spaces.
_SPACES = r"[\x20\x0A\x0D\x09]{1,20}"

# In llguidance's error of a pattern: what comes before and after it is about its own grammar.
_FAULT_OF_REGEX = re.compile(r"^error: (.+)$", re.MULTILINE)


@dataclass
class Grammar(Constraint):
    """A compiled structure, after a part of an answer."""

    _matcher: Any  # llguidance is loaded when used
    _param: str

    def begin(self, answered: Sequence[int]) -> Grammar:
        """A copy that goes on after the beginning of an answer. Raises RequestRefused if that breaks the
        structure."""
        copy = Grammar(self._matcher.deep_copy(), self._param)
        for token in answered:
            copy.accept(token)
        return copy

    @override
    def allow(self, words: NDArray[np.int32]) -> bool:
        """Raises RequestRefused when the structure is too complex to go on."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        return True

    @override
    def accept(self, token: int) -> None:
        if not self._matcher.is_stopped():  # what comes after the end is not its concern
            self._matcher.consume_token(token)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestRefused(
                f"{self._param} cannot be followed: {_in_short(self._matcher.get_error())}", param=self._param
            )


class Grammars:
    """Compiles structures for one tokenizer."""

    def __init__(self, tokenizer: ChatTokenizer, *, vocab_size: int, ends: frozenset[int]) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._ends = ends
        self._tokenizer: Any = None
        self._compiled: OrderedDict[bytes, Grammar] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._waiting = 0

    async def compile(self, structure: Structure) -> Grammar:
        """The grammar of a structure.

        Raises:
            ApiError: 400 for a structure that is wrong or too complex; 501 where llguidance is not installed;
                503 while too many structures wait.
        """
        digest = hashlib.sha256(f"{structure.kind}\0{structure.text}".encode()).digest()
        known = self._compiled.get(digest)
        if known is not None:
            self._compiled.move_to_end(digest)
            return known
        if self._waiting >= MAX_WAITING:
            raise ApiError("too many structures wait to be compiled", status=503, code="engine_unavailable")
        self._waiting += 1
        try:
            grammar = await asyncio.get_running_loop().run_in_executor(self._thread, self._compile, structure)
        finally:
            self._waiting -= 1
        self._compiled[digest] = grammar
        if len(self._compiled) > MAX_GRAMMARS:
            self._compiled.popitem(last=False)
        return grammar

    def load(self) -> None:
        """Prepares the tokenizer if llguidance is installed: takes a second and holds the interpreter."""
        with suppress(ImportError, ValueError):
            self._load()

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, structure: Structure) -> Grammar:
        """Compiles; runs in the thread."""
        try:
            import llguidance  # noqa: PLC0415 - an extra
        except ImportError:
            raise ApiError(
                f"{structure.param} needs llguidance, which is not installed: pip install 'kvpin[engine]'",
                status=501,
                param=structure.param,
            ) from None
        if not self._ends:
            raise ApiError(f"{structure.param}: this model has no end token", param=structure.param)
        try:
            self._load()
            definition = _definition(structure, self._source)
        except (ValueError, RecursionError) as error:
            raise _refused(structure, str(error)) from error
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(self._tokenizer, definition, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refused(structure, matcher.get_error())
        return Grammar(matcher, structure.param)

    def _load(self) -> None:
        if self._tokenizer is None and self._ends:
            from llguidance.hf import from_tokenizer  # noqa: PLC0415 - an extra

            self._tokenizer = from_tokenizer(
                self._source.transformers, n_vocab=self._vocab_size, eos_token=sorted(self._ends)
            )


def _definition(structure: Structure, tokenizer: ChatTokenizer) -> str:
    """The structure in llguidance's words; raises ValueError."""
    from llguidance import LLMatcher, grammar_from  # noqa: PLC0415 - see Grammars

    if structure.kind == "json":
        return LLMatcher.grammar_from_json_schema(structure.text, defaults={"whitespace_pattern": _SPACES})
    if structure.kind == "tags":
        return _tags(json.loads(structure.text), tokenizer)
    return grammar_from(structure.kind, structure.text)


def _tags(tags: dict[str, Any], tokenizer: ChatTokenizer) -> str:
    """Text, and calls between marks. A mark may be a token of its own, or text."""
    from llguidance import grammar_from  # noqa: PLC0415 - see Grammars

    added = {str(token) for token in tokenizer.transformers.added_tokens_decoder.values()}
    begin, end = tags["begin"], tags["end"]
    schema = json.dumps(tags["schema"] | {"x-guidance": {"whitespace_pattern": _SPACES}})
    first = f"TEXT {begin}" if begin in added else "text_to_mark"
    last = end if end in added else json.dumps(end)
    lark = [
        "start: call* tail",
        f"call: {first} SPACE? body SPACE? {last}",
        f"body: %json {schema}",
        "SPACE: /[ \\n]+/",
        "tail: TEXT",
        "TEXT: /(.|\\n)*/",
    ]
    if begin not in added:
        lark.append(f"text_to_mark[lazy]: /(.|\\n)*{begin}/")
    return grammar_from("lark", "\n".join(lark))


def _refused(structure: Structure, reason: str) -> ApiError:
    fault = _FAULT_OF_REGEX.search(reason) if structure.kind == "regex" else None
    if fault is not None:
        reason = f"the pattern is wrong: {fault[1]}"
    return ApiError(f"{structure.param} cannot be used: {_in_short(reason)}", param=structure.param)


def _in_short(text: str) -> str:
    return " ".join(text.split())[:300]
