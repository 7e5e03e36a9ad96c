"""The page of all causes for which requests end."""

from __future__ import annotations

from proxy.core.life import Blame, Cause
from scripts.reference.markdown import page, table

_BLAME = {
    Blame.NOBODY: "",
    Blame.CHECK: "checked at once",
    Blame.SUSPECT: "suspect; breaker counts",
    Blame.REFUSED: "breaker counts",
    Blame.UNLESS_ALL: "breaker counts, unless all refuse",
    Blame.IF_ANSWERED: "breaker counts, if another one answers",
    Blame.LACKS: "others first, on this route",
}


def causes_page() -> str:
    """Every cause: what it means and what follows from it."""
    return page(
        """
        # Causes

        `scripts/docs` writes this page from `engine_adapter/causes.py`: why a request, or its attempt on one
        engine, ended. `kvpin requests` and the metric `kvpin_request_ends_total` show the cause. What follows
        from what: [a request's life](../life.md).

        *Error* is the code of kvpin's answer if nothing of an answer has reached the client. *Elsewhere*:
        another engine may still answer. *Engine*: what the attempt says about its engine.
        """,
        table(
            ("cause", "meaning", "error", "elsewhere", "engine"),
            (
                (
                    f"`{cause}`",
                    cause.meaning,
                    "" if cause.code is None else f"`{cause.code}`, {cause.code.status}",
                    "yes" if cause.elsewhere else "",
                    _BLAME[cause.blame],
                )
                for cause in Cause
            ),
        ),
    )
