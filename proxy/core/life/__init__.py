"""A request's life, as pure decisions: no await, no I/O, no clock.

    Arrived ──► ADMITTED ──► IN_TURN ──► LEASED ──► ANSWERING ──► ENDED (cause)
    (the gate)   ▲   │                    │            │            ▲
                 │   └─ wrong, too late ──┼────────────┼────────────┤
                 └──── another engine ◄───┴────────────┘            │
                       may still answer            the last one ────┘

The gate (`core/quotas.py` and `core/budget.py`) admits a request by its head: its tenant's quota, and memory
for its body. From then on `Life` decides whether to try another engine after a failed attempt, and how long
each phase may last. `flow.py` is the loop that follows it.

life.py     the phases, and what may happen in each; why it ended: `engine_adapter/causes.py`
"""

from engine_adapter.causes import Blame, Cause
from proxy.core.life.life import Attempt, Life, Phase, Rules, WrongPhase
