"""What hostile trials attack: a kvpin as its users run it, with tenants, engines, state and an exchange.

World            kvpin, two mock engines, an embedded engine that kvpin manages, Valkey
world.limit()    bounds the memory of kvpin and its engine from now on
world.books()    what they hold
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.hostile.place import ADMIN, BAD, BROKEN, GOOD, LIMITED, WELL, Place
from tests.live.conftest import Kvpin, running_kvpin
from tests.processes import address_in, wait_until
from tests.valkey import Valkey

ROOT = Path(__file__).parents[2]
LIMITED_A_MINUTE = 30
START_S = 300.0


@dataclass(frozen=True, slots=True)
class Books:
    """What kvpin holds: requests at engines, bytes of bodies, requests that wait, tasks, connections."""

    in_flight: int
    body_bytes: int
    waiting: int
    tasks: int
    connections: int

    def exceeds(self, before: Books) -> bool:
        """True if more is held than before. Background tasks may come and go."""
        return (
            self.in_flight + self.body_bytes + self.waiting > 0
            or self.tasks > before.tasks + 2
            or self.connections > before.connections
        )


@dataclass(slots=True)
class World:
    """A running kvpin and all around it.

    Attributes:
        place: what attacks are told.
        kvpin: the process.
        operator: asks it with the admin key.
    """

    place: Place
    kvpin: Kvpin
    operator: httpx.Client

    @property
    def pids(self) -> tuple[int, ...]:
        """Of kvpin, and of the engine that it manages."""
        engines = self._admin("engines")["engines"]
        return self.kvpin.process.pid, *(e["process"]["pid"] for e in engines if e.get("process"))

    def limit(self, more: int) -> None:
        """Lets kvpin and its engine have `more` bytes of memory than now."""
        for pid in self.pids:
            most = status_of(pid, "VmData") + more
            resource.prlimit(pid, resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))

    def forget_peaks(self) -> None:
        """Peaks of memory are measured from now on."""
        for pid in self.pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")

    def books(self) -> Books:
        """What kvpin holds now."""
        page = self.operator.get("/metrics").raise_for_status().text
        pools = self._admin("stats")["pools"]
        return Books(
            in_flight=sum(int(engine["in_flight"]) for pool in pools for engine in pool["engines"]),
            body_bytes=_sum(page, "kvpin_body_bytes"),
            waiting=_sum(page, "kvpin_queue_requests"),
            tasks=_sum(page, "kvpin_tasks"),
            connections=_connections(self.place.port),
        )

    def _admin(self, path: str) -> dict:
        return self.operator.get(f"/admin/v1/{path}").raise_for_status().json()


def status_of(pid: int, field: str) -> int:
    """Bytes that /proc/PID/status tells; 0 of a process that is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except FileNotFoundError:
        return 0
    found = re.search(rf"{field}:\s+(\d+)", text)
    return int(found[1]) * 1024 if found is not None else 0


def _sum(page: str, name: str) -> int:
    return round(sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE)))


def _connections(port: int) -> int:
    """Connections of clients that kvpin has not closed: established, or closed by the client alone."""
    lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    fields = (line.split() for line in lines)
    return sum(local.endswith(f":{port:04X}") and state in {"01", "08"} for _, local, _, state, *_ in fields)


@contextmanager
def running_world(
    directory: Path,
    *,
    has_keys: bool = True,
    checkout: Path | None = None,
    faketime: Path | None = None,
) -> Iterator[World]:
    """Starts everything, yields it once it serves, and ends it.

    Args:
        directory: an empty one, for state and logs.
        has_keys: clients need keys.
        checkout: of the kvpin that is attacked; None for this one.
        faketime: the library that sets kvpin's clock.
    """
    state_dir, tmp, clock = directory / "state", directory / "tmp", directory / "clock"
    for each in (state_dir, tmp):
        each.mkdir(parents=True)
    with ExitStack() as stack:
        engines = {name: stack.enter_context(_mock(name, directory)) for name in (WELL, BROKEN)}
        valkey = Valkey()
        stack.callback(valkey.kill)
        file = directory / "kvpin.toml"
        file.write_text(_settings(engines, valkey.url, state_dir, has_keys=has_keys), encoding="utf-8")
        variables = {"TMPDIR": str(tmp)}
        if faketime is not None:
            clock.write_text("+0", encoding="ascii")
            variables |= {
                "LD_PRELOAD": str(faketime),
                "FAKETIME_TIMESTAMP_FILE": str(clock),
                "FAKETIME_CACHE_DURATION": "1",  # a look at the file takes 5 µs
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",  # no operating system sets that clock
            }
        log = directory / "kvpin.log"
        kvpin = stack.enter_context(
            running_kvpin(log, "--config", str(file), checkout=checkout, tokenised=False, **variables)
        )
        port = int(kvpin.url.rpartition(":")[2])
        place = Place(
            port, kvpin.process.pid, has_keys, state_dir, tmp, valkey.url, None if faketime is None else clock
        )
        headers = {"authorization": f"Bearer {ADMIN}"} if has_keys else {}
        operator = httpx.Client(
            base_url=kvpin.url,
            headers=headers,
            timeout=60,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),  # none counts as one that kvpin holds
        )
        world = World(place, kvpin, stack.enter_context(operator))
        _wait_until_all_serve(world)
        yield world


@contextmanager
def _mock(name: str, directory: Path) -> Iterator[str]:
    log = directory / f"{name}.log"
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "tests.hostile.engines", name]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield wait_until(lambda: address_in(log, r"listening on (\S+),"), process, log, START_S)
    finally:
        process.kill()
        process.wait()


def _settings(engines: dict[str, str], valkey: str, state_dir: Path, *, has_keys: bool) -> str:
    """The file that kvpin reads."""
    tables: list[tuple[str, dict[str, object]]] = [
        ("", {"reuse": True, "state_dir": str(state_dir)} | ({"admin_key": ADMIN} if has_keys else {})),
        ("[exchange]", {"url": valkey, "namespace": "hostile"}),
        *(
            (
                "[[engines]]",
                {"kind": "openai_compatible", "id": name, "model": name, "url": url, "share_kv": True},
            )
            for name, url in engines.items()
        ),
    ]
    if has_keys:
        tables += [
            ("[[managed]]", {"kind": "embedded", "command": "--threads 1 --kv-blocks 1024"}),
            ("[[api_keys]]", {"key": GOOD, "tenant": "good"}),
            ("[[api_keys]]", {"key": BAD, "tenant": "bad", "concurrent_requests": 32}),
            (
                "[[api_keys]]",
                {
                    "key": LIMITED,
                    "tenant": "limited",
                    "concurrent_requests": 1,
                    "requests_per_minute": LIMITED_A_MINUTE,
                    "tokens_per_minute": 10_000,
                },
            ),
        ]
    return "\n".join(
        "\n".join([title, *(f"{name} = {json.dumps(value)}" for name, value in fields.items()), ""])
        for title, fields in tables
    )


def _wait_until_all_serve(world: World) -> None:
    """Returns when every engine is ready and every prompt is tokenised as far as it will be."""
    expected = 3 if world.place.has_keys else 2

    def ready() -> bool:
        pools = world._admin("stats")["pools"]
        states = [engine["state"] for pool in pools for engine in pool["engines"]]
        pending = any("being loaded" in pool["tokenisation"]["detail"] for pool in pools)
        return len(states) == expected and set(states) == {"ready"} and not pending

    wait_until(ready, world.kvpin.process, world.kvpin.log, START_S)
    time.sleep(0.5)  # first checks of health are over
