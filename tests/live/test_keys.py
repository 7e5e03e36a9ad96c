"""Keys that `kvpin keys` issues, at two workers, over a restart, and at kvpins of a group."""

import asyncio
import json
import os
import signal
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial

import pytest
from typer.testing import CliRunner

from proxy.cli.main import app
from tests.fakes import FakeEngine
from tests.live.answers import becomes
from tests.live.conftest import running_kvpin
from tests.valkey import Valkey

pytestmark = pytest.mark.live

BODY = {"model": "m", "prompt": "x", "max_tokens": 1}


def kvpin_keys(kvpin, *words, status=0):
    """Runs `kvpin keys …` against a kvpin."""
    result = CliRunner().invoke(app, ["keys", *words, "--url", kvpin.url])
    assert result.exit_code == status, result.output
    return result


def statuses(kvpin, key=None, times=20):
    """The statuses of requests over connections of their own, which reach all workers."""
    headers = {"authorization": f"Bearer {key}"} if key is not None else {}
    sent = (kvpin.post("completions", BODY, headers=headers) for _ in range(times))
    return Counter(answer.status_code for answer in sent)


@pytest.fixture
async def start(tmp_path):
    """Starts kvpins before one engine: `await start("--workers", "2")`. All end with the test."""
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(FakeEngine())
        count = iter(range(9))

        async def started(*flags, **options):
            log = tmp_path / f"{next(count)}.log"
            named = (f"--engine=openai-compatible={engine.url},id=e,model=m", "--log-format", "json")
            running = running_kvpin(log, *named, *flags, tokenised=False, **options)
            kvpin = await asyncio.to_thread(running.__enter__)
            workers = int(flags[flags.index("--workers") + 1]) if "--workers" in flags else 1
            await becomes(lambda: kvpin.log.read_text().count('"connections are accepted"') == workers)
            stack.push_async_exit(lambda *error: asyncio.to_thread(running.__exit__, *error))
            return kvpin

        yield started


async def in_thread(work, *arguments, **options):
    return await asyncio.to_thread(work, *arguments, **options)


def workers(kvpin):
    lines = [line for line in kvpin.log.read_text().splitlines() if '"worker started"' in line]
    return [json.loads(line)["pid"] for line in lines]


@pytest.mark.parametrize("reuse", [True, False])
async def test_all_workers_know_a_key_at_once_and_so_does_a_worker_that_starts_later(start, tmp_path, reuse):
    """Without reuse, they have no exchange."""
    kvpin = await start("--workers", "2", "--state-dir", str(tmp_path / "state"), reuse=reuse)
    assert await in_thread(statuses, kvpin) == {200: 20}
    added = await in_thread(kvpin_keys, kvpin, "add", "--name", "ci", "--model", "m")
    key = added.stdout.strip()
    assert key.startswith("kvp-")
    assert "keep the key, kvpin does not show it again" in added.stderr
    assert "note: this is the first key: from now on, every request needs one" in added.stderr
    assert await in_thread(statuses, kvpin) == {401: 20}
    assert await in_thread(statuses, kvpin, key) == {200: 20}

    (entry,) = json.loads((await in_thread(kvpin_keys, kvpin, "list", "--json")).stdout)["keys"]
    assert (entry["name"], entry["tenant"], entry["models"]) == ("ci", "default", ["m"])
    table = (await in_thread(kvpin_keys, kvpin)).stdout
    assert entry["id"] in table
    assert f"…{key[-4:]}" in table
    assert key not in table

    other = json.loads((await in_thread(kvpin_keys, kvpin, "add", "--json")).stdout)
    os.kill(workers(kvpin)[0], signal.SIGKILL)
    await in_thread(kvpin_keys, kvpin, "remove", other["id"])
    await becomes(lambda: kvpin.log.read_text().count("connections are accepted") == 3)
    assert await in_thread(statuses, kvpin, other["key"]) == {401: 20}
    assert await in_thread(statuses, kvpin, key) == {200: 20}
    assert key not in kvpin.log.read_text()
    kvpin.process.send_signal(signal.SIGTERM)
    await in_thread(kvpin.process.wait, 60)

    single = await start(
        "--state-dir", str(tmp_path / "state"), reuse=reuse
    )  # the book is that of all workers
    assert await in_thread(statuses, single, key, 1) == {200: 1}
    assert await in_thread(statuses, single, None, 1) == {401: 1}
    failed = await in_thread(kvpin_keys, single, "remove", other["id"], status=1)
    assert "was removed (404)" in failed.stderr
    last = await in_thread(kvpin_keys, single, "remove", entry["id"])
    assert last.stdout == f"removed {entry['id']}\n"
    assert "note: no key is left: kvpin refuses every request" in last.stderr


async def test_a_removed_key_opens_no_worker_while_its_removal_cannot_be_saved(start, tmp_path):
    kvpin = await start("--workers", "2", "--state-dir", str(tmp_path))
    added = json.loads((await in_thread(kvpin_keys, kvpin, "add", "--json")).stdout)
    assert await in_thread(statuses, kvpin, added["key"]) == {200: 20}
    file = tmp_path / "keys"
    book = file.read_bytes()
    file.write_bytes(b"damaged")
    removed = await in_thread(kvpin_keys, kvpin, "remove", added["id"])
    assert "its removal is not saved" in removed.stderr
    assert await in_thread(statuses, kvpin, added["key"]) == {401: 20}
    file.write_bytes(book)  # the operator puts a backup in its place
    await becomes(lambda: file.read_bytes() != book)
    assert await in_thread(statuses, kvpin, added["key"]) == {401: 20}


async def test_kvpins_of_a_group_over_redis_know_each_others_keys(start, tmp_path):
    valkey = Valkey()
    try:

        def flags(number):
            state = str(tmp_path / f"state-{number}")
            return ("--exchange", valkey.url, "--state-dir", state, "--admin-key", "admin")

        one, two = await start(*flags(1)), await start(*flags(2))
        add = partial(in_thread, kvpin_keys, one, "add", "--admin-key", "admin", "--json")
        first, second = [json.loads((await add()).stdout) for _ in range(2)]
        await becomes(
            lambda: statuses(two, first["key"], 1) == {200: 1} and statuses(two, None, 1) == {401: 1}
        )
        three = await start(*flags(3))
        await becomes(lambda: statuses(three, second["key"], 1) == {200: 1})
        await in_thread(kvpin_keys, three, "remove", first["id"], "--admin-key", "admin")
        for each in (one, two, three):
            await becomes(lambda each=each: statuses(each, first["key"], 1) == {401: 1})
            assert await in_thread(statuses, each, second["key"], 1) == {200: 1}
        one.process.send_signal(signal.SIGTERM)
        await in_thread(one.process.wait, 60)
        valkey.kill()
        again = await start(*flags(1))  # alone, by its own book
        assert await in_thread(statuses, again, first["key"], 1) == {401: 1}
        assert await in_thread(statuses, again, second["key"], 1) == {200: 1}
    finally:
        valkey.kill()
