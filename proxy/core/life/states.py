"""The states of a request's life, the events that change them, and the commands that follow.

Times are in monotonic seconds.
"""

from __future__ import annotations

from msgspec import Struct

from proxy.core.life.causes import Cause


class Attempt(Struct, frozen=True):
    """An attempt on an engine that failed. `error` is the caller's own."""

    engine: str
    cause: Cause
    error: Exception


# --- States ---------------------------------------------------------------------------------------------


class Admitted(Struct, frozen=True):
    """The request holds quota and body memory. It is read, placed, and waits for its turn.

    Attributes:
        since: when it came, or when its last attempt failed.
        attempts: those that have failed.
        has_begun: the client has the beginning of an answer.
        can_repeat: its body can be sent again.
        judged: how many of the attempts came before an answer began, which showed whose failures they were.
    """

    since: float
    attempts: tuple[Attempt, ...] = ()
    has_begun: bool = False
    can_repeat: bool = True
    judged: int = 0


class InTurn(Struct, frozen=True):
    """It is the request's turn, and an engine is free for it. Only this state may lead to an engine."""

    admitted: Admitted
    engine: str


class Leased(Struct, frozen=True):
    """The request counts as load of its engine. The engine has not answered yet.

    Attributes:
        since: when it was placed there.
        is_sent: the request was sent. Before that, it waits for a slot or for another request's prefix.
    """

    turn: InTurn
    since: float
    is_sent: bool = False


class Answering(Struct, frozen=True):
    """Its answer arrives.

    Attributes:
        idle_s: how long the answer may be silent; infinite for a WebSocket.
        seen: pieces of the answer that had arrived when it was looked at last.
        heard: when a new piece was last seen, or when the client was last slower than the engine.
        is_lost: the engine was lost, and nothing has come since.
    """

    leased: Leased
    idle_s: float
    seen: int
    heard: float
    is_lost: bool = False


class Ended(Struct, frozen=True):
    """The request is over, and everything it held was given back."""

    cause: Cause


State = Admitted | InTurn | Leased | Answering | Ended


# --- Events ---------------------------------------------------------------------------------------------


class Prepared(Struct, frozen=True):
    """The request was read: it can be placed. `can_repeat`: its body can be sent again."""

    can_repeat: bool = True


class Placed(Struct, frozen=True):
    """It is its turn, on this engine."""

    engine: str


class NoneLeft(Struct, frozen=True):
    """No engine is left to try."""


class Entered(Struct, frozen=True):
    """The engine is leased."""


class Sent(Struct, frozen=True):
    """The engine gets the request."""


class Began(Struct, frozen=True):
    """The answer begins. `is_socket`: as a WebSocket, which may be silent for ever."""

    is_socket: bool = False


class Answered(Struct, frozen=True):
    """The answer is complete. `is_error`: the engine's own error about the request."""

    is_error: bool = False


class Failed(Struct, frozen=True):
    """The running step failed.

    Attributes:
        error: the caller's own.
        has_begun: the client has the beginning of an answer.
        can_go_on: another engine can go on with that answer.
        engine: the engine that failed, if it is not the one whose turn it is.
    """

    cause: Cause
    error: Exception
    has_begun: bool = False
    can_go_on: bool = False
    engine: str | None = None


class Lost(Struct, frozen=True):
    """The leased engine was lost. `received`: pieces of the answer that have arrived."""

    received: int = 0


class Tick(Struct, frozen=True):
    """Time has passed. `received`: as of `Lost`. `at_client`: kvpin waits for the client to take more."""

    received: int = 0
    at_client: bool = False


class Left(Struct, frozen=True):
    """The request's own task ends: the client left, or kvpin stops."""

    cause: Cause


Event = Prepared | Placed | NoneLeft | Entered | Sent | Began | Answered | Failed | Lost | Tick | Left


# --- Commands -------------------------------------------------------------------------------------------


class Prepare(Struct, frozen=True):
    """Read the request as far as placement needs it."""


class Place(Struct, frozen=True):
    """Choose an engine. `waits`: in the queue, if all are too busy. A retry does not wait again."""

    without: frozenset[str] = frozenset()
    waits: bool = True


class Run(Struct, frozen=True):
    """Lease the engine whose turn it is, and send the request there."""

    turn: InTurn


class End(Struct, frozen=True):
    """Tell the client how the request ended, if it does not know. `attempts`: those that failed."""

    cause: Cause
    error: Exception | None = None
    attempts: tuple[Attempt, ...] = ()


class BlameEngine(Struct, frozen=True):
    """Note what a failed attempt says about its engine."""

    attempt: Attempt


class Interrupt(Struct, frozen=True):
    """End the running step: it took too long."""

    cause: Cause


Step = Prepare | Place | Run | End
Command = Step | BlameEngine | Interrupt
