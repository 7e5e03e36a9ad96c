"""What counts of the changes of engines."""

import pytest

from proxy.api.workers.missed_changes import Change, ChangeKind, Changes, heard
from proxy.core.drains import DrainBook, DrainMark


def change(kind, number):
    return Change(ChangeKind(kind), "POST", f"/{number}", b"")


@pytest.mark.parametrize(
    ("carried_out", "counts"),
    [
        (["add"], [0]),
        (["add", "remove"], []),
        (["remove"], [0]),  # the settings name it
        (["remove", "add"], [0, 1]),
        (["remove", "add", "remove"], [2]),
        (["remove", "add", "remove", "add"], [2, 3]),
    ],
)
def test_what_a_newcomer_must_do(carried_out, counts):
    drains = DrainBook()
    changes = Changes(drains)
    changes.note("other", change("remove", 9))
    made = [change(kind, number) for number, kind in enumerate(carried_out)]
    for each in made:
        changes.note("e", each)
    drains.order("gpu1:8000", drained=True, now=5.0)
    told = heard(changes.told())
    assert told.changes == [change("remove", 9), *(made[number] for number in counts)]
    assert told.drains == [DrainMark("gpu1:8000", True, 5.0)]
