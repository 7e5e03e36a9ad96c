"""Values are found by their shape, wherever they stand."""

import timeit
from time import thread_time

import pytest

from proxy.core.prompt_values import DATES, HALF_REFERENCE, LINE, VOLATILE, Paths, References, has_reference


def paths():
    return {"path": (Paths(),)}


def replaced(text, kinds):
    references = References()
    left = references.replaced(text, kinds)
    whole = left
    for reference, value in references.told.items():
        whole = whole.replace(reference, value)
    assert whole == text
    return left, [*references.told.values()]


@pytest.mark.parametrize(
    ("text", "left", "found"),
    [
        # as Qwen Code, Kimi Code, Cline, Vibe, Continue, pi and gptme write them
        (
            "a memory at `/home/me/.qwen/projects/-home-me-x/memory`. Write",
            "a memory at `[[path 1]]`. Write",
            ["/home/me/.qwen/projects/-home-me-x/memory"],
        ),
        (
            "The current working directory is `/build`. The",
            "The current working directory is `[[path 1]]`. The",
            ["/build"],
        ),
        ("4. Working Directory: /home/me/x\n", "4. Working Directory: [[path 1]]\n", ["/home/me/x"]),
        ("Absolute path: /x/y", "Absolute path: [[path 1]]", ["/x/y"]),
        ("the working directory (/x/y), so", "the working directory ([[path 1]]), so", ["/x/y"]),
        ("**Working Directory:** /x/y\n", "**Working Directory:** [[path 1]]\n", ["/x/y"]),
        ("<path>/mnt/a/SKILL.md</path>", "<path>[[path 1]]</path>", ["/mnt/a/SKILL.md"]),
        # others
        ("cwd: /x; see /x/a.py and /x", "cwd: [[path 1]]; see [[path 2]] and [[path 1]]", ["/x", "/x/a.py"]),
        ("in C:\\Users\\me\\x.", "in [[path 1]].", ["C:\\Users\\me\\x"]),
        ("open file:///home/me/x!", "open file://[[path 1]]!", ["/home/me/x"]),
        ("It is /home/me/x.\nAnd /home/me/x/", "It is [[path 1]].\nAnd [[path 1]]/", ["/home/me/x"]),
    ],
)
def test_paths(text, left, found):
    assert replaced(text, paths()) == (left, found)


@pytest.mark.parametrize(
    "text",
    [
        "https://a.example/home/me/x",
        "~/home/x and ./tmp/x",
        "run /help or and/or",
        "#!/usr/bin/env python",
        "the path /path/to/file is an example",
        "pytest /foo/bar/tests",
        "/home is where the heart is",
        "</code>",
        "x: /home/[[id 1]]/y",
    ],
)
def test_what_is_no_path_of_a_person_stays(text):
    assert replaced(text, paths()) == (text, [])


@pytest.mark.parametrize(
    "date",
    [
        "2026-11-29",
        "11/29/2026",
        "29.11.2026",
        "November 29, 2026",
        "Sunday, Nov 29 2026",
        "29 November 2026",
        "2026-11-29 (Sunday)",
    ],
)
def test_dates(date):
    assert replaced(f"Today's date is {date}.", DATES) == ("Today's date is [[date 1]].", [date])


@pytest.mark.parametrize(
    "text", ["draft/2020-12/schema", "2026-11-29T23:05Z", "v1.2026-11-29", "## Current Date", "10.1.2026-1"]
)
def test_what_is_no_date_stays(text):
    assert replaced(text, DATES) == (text, [])


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("It is 2026-11-29T23:05:44Z, 23:05:44", "It is [[time 1]], [[time 2]]"),
        ("Current time: 9", "Current time: [[time 1]]"),
        ("- Today's date is Wednesday", "- Today's date is [[time 1]]"),
        ("Current branch: main", "Current branch: [[git 1]]"),
        *((line, line) for line in ("Time zone: the client's", "Date format: as they like")),
        ("Budget: 500 of 1,000 tokens left.", "Budget: [[count 1]] of [[count 2]] tokens left."),
        ("log(`${Math.round(budget.remaining()/1000)}k remaining`)",) * 2,
        ("Git status: clean\n", "Git status: [[git 1]]\n"),
        ("Time: any", "Time: any"),
    ],
)
def test_what_changes_within_a_session(text, left):
    assert replaced(text, VOLATILE)[0] == left


@pytest.mark.parametrize(
    ("to_digit", "to_left", "is_count"), [(60, 20, True), (61, 20, False), (60, 21, False), (0, 0, False)]
)
def test_the_words_of_a_count_stand_close_together(to_digit, to_left, is_count):
    line = f"tokens{' ' * to_digit}7{' ' * to_left}left"
    assert ("[[count 1]]" in replaced(line, VOLATILE)[0]) is is_count


def test_many_words_of_counts_take_about_as_long_as_any_line():
    def seconds(line):
        text = "\n".join([line[:500]] * 100)
        return min(
            timeit.repeat(
                lambda: References().replaced(text, VOLATILE), timer=thread_time, number=1, repeat=5
            )
        )

    assert seconds("token 1 " * 70) < 8 * seconds("the budget of tokens that are used is small " * 12)


def test_a_value_that_the_bound_cuts_stays_whole():
    for before in range(LINE - 12, LINE + 2):
        text = "x" * before + " /home/me/x"
        assert replaced(text, paths())[0] in (text, "x" * before + " [[path 1]]")
    assert replaced("x" * LINE + " /home/me/x", paths()) == ("x" * LINE + " /home/me/x", [])


def test_beginnings_of_references_are_known():
    reference = "[[path 12]]"
    assert has_reference(f"a {reference}".encode())
    assert not has_reference(b"[[ -f x ]]")
    assert all(has_reference(b"[" * at + b"[path 1]]") for at in range((1 << 16) - 12, (1 << 16) + 4))
    for end in range(1, len(reference)):
        assert HALF_REFERENCE.search("a" + reference[:end])[0] == reference[:end]
    assert HALF_REFERENCE.search("a" + reference) is None
    assert HALF_REFERENCE.search("[[path x") is None
