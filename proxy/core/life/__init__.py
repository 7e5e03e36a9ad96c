"""A request's life as a state machine: events in, commands out. No await, no I/O, no clock.

    Arrived ──► Admitted ──► InTurn ──► Leased ──► Answering ──► Ended(cause)
    (the gate)   ▲   │                    │            │            ▲
                 │   └─ wrong, too late ──┼────────────┼────────────┤
                 └──── another engine ◄───┴────────────┘            │
                       may still answer            the last one ────┘

The gate (`core/quotas.py` and `core/budget.py`) admits a request by its head: its tenant's quota, and memory
for its body. From then on `Life` decides: what comes next, whether to try another engine after a failed
attempt, and how long each state may last. `flow.py` carries the commands out. Running on an engine takes an
`InTurn`, which only `Life` makes.

causes.py   why a request or an attempt ended, and all that follows from it
states.py   states, events, commands
machine.py  state + event → new state, commands
"""

from proxy.core.life.causes import Blame, Cause
from proxy.core.life.machine import Life, Rules, UnexpectedEvent
from proxy.core.life.states import (
    Admitted,
    Answered,
    Answering,
    Attempt,
    Began,
    BlameEngine,
    Command,
    End,
    Ended,
    Entered,
    Event,
    Failed,
    Interrupt,
    InTurn,
    Leased,
    Left,
    Lost,
    NoneLeft,
    Place,
    Placed,
    Prepare,
    Prepared,
    Run,
    Sent,
    Tick,
)
