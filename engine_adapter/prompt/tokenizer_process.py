"""Loads a tokenizer with the help of a second process, which bears what loading costs.

    load_tokenizer(source)  ──→  python -m engine_adapter.prompt.tokenizer_process SOURCE
                                 local files, then the model hub → transformers → fastest exact encoder
    ChatTokenizer           ←──  Description, then the process ends; it also ends if kvpin is killed

In one process, transformers' loader would take several times the memory of the tokenizer it makes, hold the
GIL for seconds, import torch where it is installed, and retry for a minute where the hub is out of reach.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

import msgspec

from engine_adapter.end_with_parent import ends_with_parent
from engine_adapter.errors import EngineSpecError, EngineUnavailable
from engine_adapter.prompt.chat import ChatTokenizer, check_source, load_transformers
from engine_adapter.prompt.described import DescribedTokenizer, Description, describe

HUB_S = 3.0
"""Seconds that the model hub may take to answer."""
MAX_BYTES = 8 << 30
"""Memory that loading may take."""
MAX_CPU_S = 300
"""CPU seconds that loading may take."""
_FILES = ("tokenizer.json", "tokenizer_config.json")


class _Failure(msgspec.Struct, frozen=True, tag=True):
    """Why there is no tokenizer, and whether there may be one later."""

    reason: str
    passes: bool


# What a directory's tokenizer and chat template may be made of.
_OF_TOKENIZERS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "additional_chat_templates/*.jinja")


def version_of(source: str) -> str:
    """Changes with the files of a tokenizer: its directory or its GGUF file. "" for one of the model hub."""
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted({file for pattern in _OF_TOKENIZERS for file in path.glob(pattern)})
    else:
        files = [path] if source.endswith(".gguf") else []
    states = [(file.name, file.stat()) for file in files if file.is_file()]
    return " ".join(f"{name}:{state.st_size}:{state.st_mtime_ns}:{state.st_ino}" for name, state in states)


async def load_tokenizer(source: str) -> ChatTokenizer:
    """Loads the tokenizer of a directory, of a GGUF file or, by its id, of the model hub.

    Takes seconds, but does not block the event loop. Cancelling it ends the second process. Raises
    EngineSpecError: nothing usable is there; EngineUnavailable: the hub did not answer within 3 s, or the
    second process was killed, or cannot be started now: no memory, too many files or processes."""
    check_source(source)
    try:
        process = await asyncio.create_subprocess_exec(
            *ends_with_parent([sys.executable, "-m", __name__, source]),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # what libraries print; the reason comes as an answer
            start_new_session=True,  # a signal to kvpin's whole group is for kvpin, which ends this process
        )
    except OSError as error:
        reason = f"its loader cannot be started: {error.strerror}"
        raise EngineUnavailable(f"tokenizer {source!r} cannot be loaded: {reason}") from error
    try:
        answer, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        reason = f"its loader ended with status {process.returncode}"
        raise EngineUnavailable(f"tokenizer {source!r} cannot be loaded: {reason}")
    return await asyncio.to_thread(_read, answer, source)


def _read(answer: bytes, source: str) -> ChatTokenizer:
    """The tokenizer that the second process described."""
    found = msgspec.msgpack.decode(answer, type=Description | _Failure)
    if isinstance(found, _Failure):
        raise (EngineUnavailable if found.passes else EngineSpecError)(found.reason)
    if found.tokenizer is None:
        return ChatTokenizer.load(source)
    tokenizer = DescribedTokenizer(found)
    return ChatTokenizer(tokenizer, source=source, encoder=tokenizer.encoder)


# --- the second process --------------------------------------------------------------------------------


def main() -> None:
    """Loads the tokenizer that the command line names and writes its description to standard output."""
    os.nice(10)  # requests come first
    output, source = os.dup(1), sys.argv[1]
    os.dup2(2, 1)  # what libraries print is not an answer
    sys.modules["torch"] = None  # type: ignore[assignment]  # no tokenizer needs it: 200 MB and seconds less
    _limit()  # a chat template is a program, and is tried out here
    found: Description | _Failure
    try:
        found = describe(_load(source))
    except (MemoryError, TimeoutError):
        limits = f"{MAX_BYTES >> 30} GiB of memory or {MAX_CPU_S} s of CPU time"
        found = _Failure(f"tokenizer {source!r} cannot be loaded: it takes over {limits}", passes=False)
    except (EngineSpecError, EngineUnavailable) as error:
        found = _Failure(str(error), isinstance(error, EngineUnavailable))
    with os.fdopen(output, "wb") as answer:
        answer.write(msgspec.msgpack.encode(found))
    os._exit(0)  # a thread may still wait for the hub


def _limit() -> None:
    def stop(number: int, frame: object) -> NoReturn:  # noqa: ARG001 - signal's
        raise TimeoutError

    signal.signal(signal.SIGXCPU, stop)
    # For data, files that are only mapped do not count.
    for kind, limit in ((resource.RLIMIT_CPU, MAX_CPU_S), (resource.RLIMIT_DATA, MAX_BYTES)):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _load(source: str) -> object:
    """The transformers tokenizer: from local files where they are, else from the hub, if it answers."""
    if Path(source).expanduser().exists() or source.endswith(".gguf"):
        return load_transformers(source, local_files_only=True)
    if _is_cached(source):
        try:
            return load_transformers(source, local_files_only=True)
        except EngineSpecError:
            pass  # an incomplete copy
    if not _hub_answers():
        raise EngineUnavailable(
            f"tokenizer {source!r} is not on this machine, and the model hub does not answer within "
            f"{HUB_S:.0f} s; copy it here and name its directory: tokenizer=DIR"
        )
    return load_transformers(source)


def _is_cached(source: str) -> bool:
    """True if the hub's cache has files of this model."""
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - for the second process alone

    try:
        return any(isinstance(try_to_load_from_cache(source, name), str) for name in _FILES)
    except ValueError as error:
        raise EngineSpecError(f"tokenizer {source!r} is neither a directory nor a model id") from error


def _hub_answers() -> bool:
    """True if the hub answers in time; a lookup of its address has no time-out of its own."""
    from huggingface_hub import constants, get_session  # noqa: PLC0415 - likewise

    answered = threading.Event()

    def ask() -> None:
        get_session().head(constants.ENDPOINT, timeout=HUB_S)
        answered.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_S)
    return answered.is_set()


if __name__ == "__main__":
    main()
