"""What counts of the changes of engines."""

import pytest

from proxy.api.workers.missed_changes import Change, ChangeKind, Changes, heard


def change(kind, number):
    return Change(ChangeKind(kind), "POST", f"/{number}", b"")


@pytest.mark.parametrize(
    ("carried_out", "counts"),
    [
        (["add"], [0]),
        (["add", "drain"], [0, 1]),
        (["add", "drain", "drain"], [0, 2]),
        (["add", "drain", "remove"], []),
        (["drain", "drain"], [1]),
        (["drain", "remove"], [1]),  # the settings name it
        (["remove", "add"], [0, 1]),
        (["remove", "add", "drain", "remove"], [3]),
        (["remove", "add", "drain", "remove", "add"], [3, 4]),
    ],
)
def test_what_a_newcomer_must_do(carried_out, counts):
    changes = Changes()
    changes.note("other", change("drain", 9))
    made = [change(kind, number) for number, kind in enumerate(carried_out)]
    for each in made:
        changes.note("e", each)
    assert heard(changes.told()) == [change("drain", 9), *(made[number] for number in counts)]
