"""Replays a recording for the page: `kvpin replay`, in a process of its own, of the lowest priority."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec

from engine_adapter import ends_with_parent
from proxy.errors import BadRequest
from proxy.request.bodies import room_for

MAX_TRACE_BYTES = 32 * 2**20
LONGEST_S = 600.0
# Options of the command that may be given.
OPTIONS = (
    "engines",
    "gpu_tokens",
    "host_tokens",
    "prefill_rate",
    "policies",
    "load",
    "speedup",
    "model_name",
)
_UNUSABLE = 2
_LOWEST_PRIORITY = 19
_NAME = "recording.jsonl"


class CurvesAnswer(msgspec.Struct):
    """One plot: places on the axis, and the values of each policy there, null where there is none."""

    title: str
    axis: str
    x: list[int]
    lines: list[dict[str, Any]]
    is_log: bool


class ReplayAnswer(msgspec.Struct):
    """Result of `kvpin replay`: `runs` are those of its --json."""

    title: str
    notes: list[str]
    curves: list[CurvesAnswer]
    runs: list[dict[str, Any]]


class Replays:
    """Replays one recording at a time; others wait for their turn."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def play(self, trace: bytes, options: Mapping[str, str]) -> ReplayAnswer:
        """Replays it; a cancelled call ends the process.

        Raises:
            BadRequest: the recording or an option cannot be used, or it takes too long.
            NoMemory: the temporary directory does not take the recording.
        """
        async with self._turn:
            with ExitStack() as stack:
                with room_for("the recording"):
                    home = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpin-replay-"))
                    path = Path(home, _NAME)
                    await asyncio.to_thread(path.write_bytes, trace)
                return await self._play(path, options)

    async def _play(self, path: Path, options: Mapping[str, str]) -> ReplayAnswer:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        command = [sys.executable, "-P", "-m", "proxy.cli", "replay", str(path), *flags]
        process = await asyncio.create_subprocess_exec(
            *ends_with_parent([*command, "--jobs=1", "--json=-"]),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            with suppress(ProcessLookupError):  # it has ended already
                os.setpriority(os.PRIO_PROCESS, process.pid, _LOWEST_PRIORITY)
            async with asyncio.timeout(LONGEST_S):
                out, err = await process.communicate()
        except TimeoutError:
            raise BadRequest(
                f"the replay takes longer than {LONGEST_S:g} s: choose fewer engines, sizes or "
                "policies, or use the command, `kvpin replay`"
            ) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            raise _refusal(
                process.returncode, err.decode(errors="replace").replace(str(path), "the recording")
            )
        return await asyncio.to_thread(_answer, out)


def _answer(out: bytes) -> ReplayAnswer:
    from proxy.replay.report import curves  # noqa: PLC0415 - slow to import, and seldom needed

    document = msgspec.json.decode(out)
    drawn = msgspec.convert(curves(document["runs"]), list[CurvesAnswer])
    title = document["title"].replace(_NAME, "recording", 1)
    return ReplayAnswer(title, [*document["doubts"], *document["notes"]], drawn, document["runs"])


def _refusal(status: int, text: str) -> BadRequest:
    """Why the command refused, in its words, and the option that is at fault."""
    if status != _UNUSABLE:
        return BadRequest(
            f"the replay ended with status {status}: the recording may be too long for this machine"
        )
    message = text.rpartition("Error: ")[2].strip().removeprefix("kvpin: ")
    named = re.search(r"--([a-z0-9-]+)", message)
    flag = named[1].replace("-", "_") if named is not None else ""
    return BadRequest(message, param=flag if flag in OPTIONS else None)
