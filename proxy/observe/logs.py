"""What kvpin prints: log lines, and the text at start."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from proxy.fleet.engine import Engine, EngineState
from proxy.fleet.fleet import Fleet
from proxy.request.tenants import Tenants
from proxy.settings import LogSettings, Settings

# --- log lines: structured, on standard error, without prompt text and without keys ---------------------
# Code logs through `structlog.get_logger`. Lines of libraries that use `logging` get the same form. Values
# bound with structlog's contextvars (the request id) are on every line of that request's task.

# Control characters but tabs and line ends.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# Characters of a field that are written.
_MOST = 4_000
# Fields whose values must not be logged. To log one is a mistake; the line is kept, its value is hidden.
_HIDDEN = frozenset(
    {
        "admin_key", "api_key", "authorization", "body", "content", "cookie", "headers", "key", "messages",
        "password", "prompt", "secret", "text", "token_ids",
    }
)  # fmt: skip


def configure_logs(settings: LogSettings, stream: TextIO | None = None, *, worker: int | None = None) -> None:
    """Configures structlog and `logging` for the process. May be called again.

    Args:
        settings: format and level.
        stream: gets the lines, standard error by default.
        worker: this process's number, which is on every line that is not about another worker; None where
            there is one process.
    """
    handler = logging.StreamHandler(stream) if stream is not None else _StandardError()
    stream = handler.stream
    pretty = settings.format == "pretty" or (settings.format == "auto" and stream.isatty())
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        hide_secrets,
        cut_long,
    ]
    if worker is not None:
        shared.append(lambda _logger, _method, event: {**event, "worker": event.get("worker", worker)})
    # Without the cache, loggers made before this call follow it too.
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=_renderers(pretty, stream))
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    # It tells of each request; kvpin makes many of its own.
    logging.getLogger("httpx").setLevel(logging.WARNING)


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to what is standard error at that moment: a bar on the terminal takes its place for a while."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        """Ignored: `logging` sets it once."""


def hide_secrets(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:  # noqa: ARG001 - structlog's
    """A structlog processor: replaces fields that may hold prompts or keys by `[hidden]`."""
    for name in event.keys() & _HIDDEN:
        event[name] = "[hidden]"
    return event


def cut_long(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:  # noqa: ARG001 - likewise
    """A structlog processor: cuts fields that are too long for a line. Engines and clients may be quoted."""
    for name, value in event.items():
        if isinstance(value, str) and len(value) > _MOST:
            event[name] = f"{value[:_MOST]}… ({len(value)} characters)"
    return event


def escape_controls(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:  # noqa: ARG001 - likewise
    """A structlog processor for terminals: writes control characters out, except tabs and line ends.

    What clients and engines send gets into log lines, and could move the cursor or rename the window.
    """
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[name] = _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", value)
    return event


def _renderers(pretty: bool, stream: TextIO) -> list[Processor]:
    # Tracebacks have no local variables: those may hold prompts and keys.
    last: list[Processor]
    if pretty:
        colors = stream.isatty() and not os.environ.get("NO_COLOR")
        plain = structlog.dev.plain_traceback
        last = [escape_controls, structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain)]
    else:
        tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        last = [structlog.processors.ExceptionRenderer(tracebacks), structlog.processors.JSONRenderer()]
    return [structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]


# --- the text that `kvpin serve` prints: its addresses, engines that are down, a request to copy --------

_NAMED = 3  # engines; more are counted
_STARTED = (EngineState.READY, EngineState.DRAINING)


@contextmanager
def waiting_bar(fleet: Fleet, has_joined: Callable[[], bool]) -> Iterator[Callable[[], None]]:
    """Yields what draws the bar as it is now. Draws nothing unless both outputs are terminals: lines that are
    written meanwhile, to either, appear above the bar."""
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        yield lambda: None
        return
    from rich.console import Console  # noqa: PLC0415 - slow to import
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(), transient=True, refresh_per_second=2) as progress:
        bar = progress.add_task("", total=None)

        def draw() -> None:
            ready, text = summary(fleet, has_joined=has_joined())
            progress.update(bar, completed=ready, total=len(fleet.engines) or None, description=text)

        draw()
        yield draw


def summary(fleet: Fleet, *, has_joined: bool) -> tuple[int, str]:
    """The number of engines that are ready; then the others with their states, and what else is awaited."""
    others = [engine for engine in fleet.engines.values() if engine.state not in _STARTED]
    named = [f"{engine.id} {engine.state.value}" for engine in others[:_NAMED]]
    if len(others) > _NAMED:
        named.append(f"{len(others) - _NAMED} more")
    if fleet.is_ready() and not has_joined:
        named.append("asking other kvpins what they know")
    return len(fleet.engines) - len(others), ", ".join(["engines ready", *named])


POLL_S = 0.1
_DRAINED = {EngineState.DRAINING: " (drained)"}
# All other states are named with their reason.
_USABLE = (EngineState.CONNECTING, EngineState.READY, EngineState.SUSPECT, EngineState.DRAINING)


class Banner:
    """The lines a person needs to start using kvpin, which listens on `host` and `port`. `has_joined`: this
    kvpin knows what others know."""

    def __init__(
        self,
        fleet: Fleet,
        host: str,
        port: int,
        settings: Settings,
        has_joined: Callable[[], bool] = lambda: True,
        tenants: Tenants | None = None,
    ) -> None:
        self._fleet, self._settings, self._has_joined = fleet, settings, has_joined
        self._tenants = tenants if tenants is not None else Tenants(())
        # A client cannot connect to a wildcard address.
        name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
        self._base = f"{'https' if settings.tls else 'http'}://{name}:{port}"

    def print_addresses(self) -> None:
        """Prints the addresses; called as soon as kvpin listens."""
        off = "off: the least loaded engine is chosen (--reuse turns it on)"
        _print(f"kvpin {version('kvpin')}, KV cache reuse {'on' if self._settings.reuse else off}")
        _print(f"  base_url  {self._base}/v1")
        _print(f"  admin     {self._base}/admin/v1")
        if self._settings.ui:
            _print(f"  page      {self._base}/ui/")
        _print("waiting for engines …")

    async def print_when_ready(self) -> None:
        """Prints each engine that is down, at once; then, when the others are ready, what they serve."""
        named: set[str] = set()
        with waiting_bar(self._fleet, self._has_joined) as draw:
            while True:
                for engine in self._fleet.engines.values():
                    is_known = engine.is_served_there or engine.is_own or engine.id in named
                    is_usable = engine.state in _USABLE and not engine.model_failed
                    if not is_usable and not is_known:
                        named.add(engine.id)
                        _print(_why_not(engine))
                if self._fleet.is_ready() and self._has_joined():
                    break
                draw()
                await asyncio.sleep(POLL_S)
        self._print_ready()
        for model, named_by in self._fleet.lost_names().items():
            _print(f"not served: {model} ({named_by})")
        for model, tenant in self._lost_models():
            _print(f"not served: {model} (a key of tenant {tenant!r} is for it)")
        if self._fleet.pools:
            self._print_request()

    def _lost_models(self) -> list[tuple[str, str]]:
        """Models that keys are for and nothing serves, each with the tenant of such a key. Empty while
        another kvpin uses engines for this one: their models are not known here."""
        if any(engine.is_served_there for engine in self._fleet.engines.values()):
            return []
        named = {(model, key.tenant) for key in self._tenants.keys for model in key.models or ()}
        return sorted(each for each in named if not self._fleet.has_model(each[0]))

    def _print_ready(self) -> None:
        for pool in self._fleet.pools.values():
            engines = [each for each in self._fleet.engines_of(pool) if not each.model_failed]
            if names := [f"{each.id}{_DRAINED.get(each.state, '')}" for each in engines]:
                _print(f"ready: {pool.model} on {', '.join(names)}")
        for engine in self._fleet.engines.values():
            if engine.is_served_there:
                _print(f"ready: {engine.id} through the kvpin {engine.owner}, which uses it")

    def _print_request(self) -> None:
        """A request to copy, for the ready model that most keys are for. It names a variable, never a key:
        this output may end up in a log."""
        now, served = time.time(), self._fleet.served()
        served |= {alias: served[own] for alias, own in self._fleet.served_aliases().items()}
        keys = [key.models for key in self._tenants.keys if not key.has_expired(now)]
        fitting = {name: sum(models is None or name in models for models in keys) for name in served}
        is_ready = {name: bool(self._fleet.pools[pool].ready()) for name, pool in served.items()}
        model = max(served, key=lambda name: (fitting[name] > 0, is_ready[name], fitting[name]))
        if not (fitting[model] or self._tenants.open):
            return
        body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32}
        of = "one of your keys" if fitting[model] == len(keys) else f"a key for {model}"
        _print("try it:" if self._tenants.open else f"try it, with {of} in OPENAI_API_KEY:")
        _print(f"  curl {self._base}/v1/chat/completions \\")
        if not self._tenants.open:
            _print('    -H "authorization: Bearer $OPENAI_API_KEY" \\')
        _print("    -H 'content-type: application/json' \\")
        _print(f"    -d '{json.dumps(body)}'")


def _why_not(engine: Engine) -> str:
    process = engine.process
    if process is not None and process.error is not None:
        return f"not running: {engine.id}: {process.error}".replace("\n", "\n  ")
    if engine.state is not EngineState.DOWN:
        return f"{engine.state.value}: {engine.id}: {engine.last_error}"
    url = engine.adapter.spec.url
    how = "refuses kvpin" if engine.refuses else "not reachable"
    return f"{how}: {engine.id} at {url}: {engine.last_error}; kvpin keeps trying"


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - this module's purpose
