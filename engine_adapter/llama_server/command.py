"""The command line of a llama-server that kvpin starts: the operator's words, flags that reuse needs, and a
directory in memory for its saved KV.

llama-server does not know `--flag=value`, reads `_` in long flags as `-`, and uses the last of equal flags.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import stat
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path

from engine_adapter.errors import EngineSpecError
from engine_adapter.llama_server.saved_files import is_in_memory, size_of

BINARY = "llama-server"
BINARY_VARIABLE = "LLAMA_SERVER"
"""Names the binary where a command does not."""
DEFAULT_SLOTS = 4

_CHOSEN_BY_KVPIN = ("--port", "--host")
_SLOTS = ("-np", "--parallel")
_CACHE_RAM = ("-cram", "--cache-ram")
_SAVE_PATH = ("--slot-save-path",)
_MODEL_FILE = ("-m", "--model")
_MODEL_ELSEWHERE = ("-mu", "--model-url", "-dr", "--docker-repo", "-hf", "-hfr", "--hf-repo")
_MODEL_PRESET = re.compile(r"--(fim|gpt-oss|vision|embd)-.+-(default|spec)")
_MEMORY = Path("/dev/shm")  # noqa: S108 - a private directory is made in it, see make_save_dir
_ENOUGH_BYTES = 2**30
_MOST_BYTES = 8 * 2**30
FLAG_ALONE = "--cache-reuse has no effect: only cache_reuse = N of the engine allows it, as answers differ"
_HINT = "scripts/llama-server of kvpin's repository builds one"


def llama_server_command(
    words: Sequence[str], *, port: int, save_dir: str | None, binary: str = BINARY
) -> list[str]:
    """The whole command line. It keeps every word of the operator: the options, with or without the name of
    the binary before them. `save_dir` and `binary` are used unless the words name others.

    It has no flag that turns the web UI off: the flag's name differs between releases, and a server refuses
    to start with an unknown flag.
    """
    program, options = _split(words, binary)
    given = {_flag(word) for word in options}
    wanted = [
        (_SLOTS, ["-np", str(DEFAULT_SLOTS)]),
        (("--slots", "--no-slots"), ["--slots"]),
        (("--metrics",), ["--metrics"]),
        (_SAVE_PATH, ["--slot-save-path", f"{save_dir.rstrip('/')}/"] if save_dir else []),
        (_CACHE_RAM, ["--cache-ram", "0"]),
    ]
    missing = [word for names, flag in wanted if given.isdisjoint(names) for word in flag]
    return [program, *options, "--host", "127.0.0.1", "--port", str(port), *missing]


def check_words(words: Sequence[str]) -> None:
    """Raises EngineSpecError for words that start a server on no machine."""
    _, options = _split(words, BINARY)
    for word in options:
        if word.split("=")[0] in _CHOSEN_BY_KVPIN:
            raise EngineSpecError(f"{word.split('=')[0]} is chosen by kvpin: leave it out")
    # Without a model it starts as a router of other servers, which has no slots and is always healthy.
    named = {_flag(word) for word in options}
    if named.isdisjoint((*_MODEL_FILE, *_MODEL_ELSEWHERE)) and not any(map(_MODEL_PRESET.fullmatch, named)):
        raise EngineSpecError(
            "the command names no model: add -m FILE, -hf REPO or --model-url URL, e.g. "
            f"'llama-server: -m model.gguf' ({BINARY} itself is taken from the PATH, and {_HINT})"
        )


def check_files(words: Sequence[str], *, binary: str = BINARY) -> None:
    """Raises EngineSpecError if this machine lacks the binary or the model file."""
    program, options = _split(words, binary)
    if shutil.which(program) is None:
        where = f" (named by {BINARY_VARIABLE})" if program == binary != BINARY else ""
        raise EngineSpecError(
            f"there is no program {program!r}{where}: begin the command with the path of a llama-server, put "
            f"one on the PATH, or name it in {BINARY_VARIABLE} ({_HINT})"
        )
    model = _value(options, _MODEL_FILE)
    # With an address beside it, the file is the target of a download.
    if model and not Path(model).is_file() and {_flag(word) for word in options}.isdisjoint(_MODEL_ELSEWHERE):
        raise EngineSpecError(f"the model file {model!r} does not exist: -m takes the path of a GGUF file")


def named_save_dir(words: Sequence[str]) -> str | None:
    """The `--slot-save-path` the words give."""
    return _value(words, _SAVE_PATH)


def named_api_key(words: Sequence[str]) -> str | None:
    """The first API key in the words."""
    return (_value(words, ("--api-key",)) or "").split(",")[0].strip() or None


def advice(words: Sequence[str]) -> tuple[str, ...]:
    """One sentence for each flag that hinders the reuse of KV and that the server itself does not tell."""
    return tuple(text for flags, harmless, text in _ADVICE if _hinders(words, flags, harmless))


def _hinders(words: Sequence[str], flags: Collection[str], harmless: str | Collection[str]) -> bool:
    """True if a flag has another value than the harmless one, or comes after all its opposites."""
    if isinstance(harmless, str):
        return _value(words, flags) not in (None, harmless)
    given = [flag for word in words if (flag := _flag(word)) in flags or flag in harmless]
    return bool(given) and given[-1] in flags


_ADVICE: tuple[tuple[tuple[str, ...], str | tuple[str, ...], str], ...] = (
    (("--no-cache-prompt",), ("--cache-prompt",),
     "--no-cache-prompt makes the server compute every prompt from its beginning: leave it out"),
    (("--context-shift",), ("--no-context-shift",),
     "--context-shift drops tokens from running slots, whose KV kvpin then no longer knows: leave it out"),
    (("--cache-reuse",), "0", FLAG_ALONE),
    (("--sleep-idle-seconds",), "-1",
     "--sleep-idle-seconds lets an idle server drop the KV of all its slots: leave it out"),
)  # fmt: skip


def _split(words: Sequence[str], binary: str) -> tuple[str, list[str]]:
    """The program and its options. A bare `llama-server` is `binary`, too, unless the PATH has one."""
    if not words or words[0].startswith("-"):
        return binary, list(words)
    is_bare = words[0] == BINARY and shutil.which(BINARY) is None
    return binary if is_bare else words[0], list(words[1:])


def _flag(word: str) -> str:
    return word.replace("_", "-") if word.startswith("--") else word


def _value(words: Sequence[str], names: Collection[str]) -> str | None:
    """The value after the last use of a flag, None without one."""
    return next((value for value, word in pairwise(reversed(words)) if _flag(word) in names), None)


# --- its directory for saved KV -------------------------------------------------------------------


@functools.cache
def default_save_dir() -> Path:
    """`/dev/shm/kvpin-<uid>` if that is memory, otherwise `kv` in kvpin's cache directory. A tmpfs with less
    than 1 GiB free is too small for KV of real models (containers get 64 MiB by default). The answer does not
    change while the process runs."""
    directory = _MEMORY / f"kvpin-{os.getuid()}"
    if is_in_memory(_MEMORY) and _room(directory) >= _ENOUGH_BYTES:
        return directory
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("KVPIN_CACHE") or Path(home, "kvpin"), "kv")


@functools.cache
def default_save_bytes(directory: Path) -> int:
    """The cap of the files in `directory`: half of the room for them, at most 8 GiB. It stays the same while
    the process runs: servers that share a directory need equal caps."""
    return max(min(_room(directory) // 2, _MOST_BYTES), 1)


def make_save_dir(directory: Path) -> None:
    """Makes the directory for this user alone, because it holds prompts. It may exist already. Raises
    EngineSpecError if it cannot be made, or another user made it in a shared place."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        problem = f"the directory {str(directory)!r} for saved KV cannot be made: {error.strerror}"
        raise EngineSpecError(problem) from error
    if directory != default_save_dir():
        return  # the operator chose it, and chooses who may read it
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise EngineSpecError(
            f"{directory} is not this user's directory: have it removed, or set host_cache_dir to another"
        )
    directory.chmod(0o700)


def _room(directory: Path) -> int:
    """Bytes that files in `directory` may take: the free ones and those they take already."""
    place = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    own = sum(map(size_of, directory.iterdir())) if place == directory else 0
    return shutil.disk_usage(place).free + own
