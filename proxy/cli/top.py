"""`kvpin top`."""

from __future__ import annotations

import time

import typer

from proxy.cli.client import AdminClient, AdminError, fail

_AGAIN_S = 1.0


def top(*, kvpin: AdminClient) -> None:
    """Watch engines, and requests as they pass, until Ctrl-C.

    Where the output is no terminal, it prints the engines once.
    """
    from rich.live import Live  # noqa: PLC0415 - slow to import

    from proxy.cli.grid import console  # noqa: PLC0415 - likewise
    from proxy.cli.top_view import TopView  # noqa: PLC0415 - likewise

    out, view = console(), TopView(kvpin.url)
    try:
        events = kvpin.events("/events")
        first = next(events, None)
        if first is None:
            fail(f"{kvpin.url} sends no events: it is no kvpin, or is about to stop")
        view.take(*first)
        if not out.is_terminal:
            out.print(view)
            return
        with Live(view, console=out, screen=True, refresh_per_second=4):
            while True:
                try:
                    for name, event in events:
                        view.take(name, event)
                    view.problem = "kvpin ended the stream of events; trying again"
                except AdminError as error:
                    view.problem = f"{error}; trying again"
                time.sleep(_AGAIN_S)
                events = kvpin.events("/events")
    except AdminError as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
