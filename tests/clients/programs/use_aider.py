"""aider, as a command: one task in an empty directory."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from features import World, main


async def agent(world: World) -> None:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "hello.txt")
        file.write_text("hello\n")
        process = await asyncio.create_subprocess_exec(
            *(str(Path(sys.executable).parent / "aider"), "--model", f"openai/{world.model}"),
            *("--openai-api-base", world.base_url, "--openai-api-key", world.key),
            *("--message", world.wish("edit")[0], "--edit-format", "diff", "--yes-always", "--no-git"),
            *("--no-check-update", "--no-show-model-warnings", "--no-analytics", "--map-tokens", "0"),
            *("--no-show-release-notes", "--no-pretty", "--no-detect-urls", "hello.txt"),
            cwd=directory,
            env={**os.environ, "HOME": directory, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        printed = (await process.communicate())[0].decode()
        assert process.returncode == 0, printed
        assert "Tokens: " in printed, printed  # usage
        assert file.read_text() == "goodbye\n", printed


if __name__ == "__main__":
    main()
