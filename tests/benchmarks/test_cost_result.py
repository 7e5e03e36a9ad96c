"""Tables of router_cost.py: quantiles, marks of missed goals, and what could not be measured."""

import pytest


@pytest.fixture
def made():
    import cost_result

    return cost_result


@pytest.fixture
def figures(made):
    def figures(*given, memory=(), **rest):
        found = [
            made.Figure(router, load, turn, 100, cpu_us, p50_ms, p99_ms, 10.0, 5.0, 0.25)
            for router, load, turn, cpu_us, p50_ms, p99_ms in given
        ]
        readings = [made.Memory(*reading) for reading in memory]
        return made.Figures(found, readings, rest.get("not_measured", {}), rest.get("failures", []))

    return figures


def cells_of(text, title, table=0):
    """The cells of a row, by the first table that has it, or a later one."""
    rows = [line for line in text.splitlines() if line.startswith(f"| {title} |")]
    return [cell.strip() for cell in rows[table].split("|")[2:-1]]


@pytest.mark.parametrize(
    ("values", "share", "wanted"),
    [
        (range(1, 101), 0.5, 50),
        (range(1, 101), 0.99, 99),
        ([3, 1, 2], 1.0, 3),
        ([7], 0.5, 7),
        ([], 0.5, 0),
    ],
)
def test_quantiles_are_by_rank(made, values, share, wanted):
    assert made.quantile(values, share) == wanted


def test_a_histogram_has_the_quantiles_of_its_values(made):
    counts = [(30, 1), (10, 98), (20, 1)]
    assert [made.quantile_of_counts(counts, share) for share in (0.5, 0.98, 0.99, 1.0)] == [10, 10, 20, 30]
    assert made.quantile_of_counts([], 0.5) == 0


def test_the_best_repeat_counts_and_a_missed_goal_is_marked(made, figures):
    text = made.markdown(
        figures(
            ("kvpin", "small c1", "first", 300.0, 1, 2),
            ("kvpin", "small c1", "first", 249.6, 1, 2),
            ("kvpin", "long c1", "first", 1001.0, 1, 2),
            ("kvpin", "long c1", "next", 400.0, 1, 2),
            ("nginx", "small c1", "first", 9999.0, 1, 2),
        )
    )
    assert cells_of(text, "kvpin, reuse on, new chats") == ["250", "1,001 ✗"]
    assert cells_of(text, "kvpin, reuse on, next turns") == ["–", "400"]
    assert cells_of(text, "nginx") == ["9,999", "–"]
    assert cells_of(text, "goal, new chats") == ["≤ 250", "≤ 1,000"]
    assert cells_of(text, "goal, next turns") == ["≤ 250", "≤ 400"]
    assert "marks a missed goal of kvpin: 1." in text


def test_a_long_tail_at_64_connections_and_too_much_memory_are_marked(made, figures):
    text = made.markdown(
        figures(
            ("kvpin", "small c64", "first", 1.0, 2.0, 6.5),
            ("kvpin", "small c16", "first", 1.0, 2.0, 6.5),
            memory=[("kvpin", 100.0, 251.0), ("kvpin", 110.0, 200.0), ("sglang", 90.0, 900.0)],
        )
    )
    assert cells_of(text, "kvpin, reuse on, new chats", table=1) == ["2.0 / 6.5", "2.0 / 6.5 ✗"]
    assert cells_of(text, "kvpin, reuse on") == ["110", "251 ✗"]
    assert cells_of(text, "sglang-router 0.3.2 cache_aware") == ["90", "900"]


def test_what_is_missing_or_failed_is_said(made, figures):
    text = made.markdown(
        figures(not_measured={"sglang": "pip failed"}, failures=["kvpin, small c1: 2 of 64: closed"])
    )
    assert "Not measured: sglang-router 0.3.2 cache_aware: pip failed." in text
    assert "Failed requests: kvpin, small c1: 2 of 64: closed." in text


def test_the_picture_has_a_panel_for_each_load(made, figures, tmp_path):
    path = tmp_path / "cost.png"
    made.draw(
        figures(("kvpin", "small c1", "first", 300.0, 1, 2), ("nginx", "SSE 64", "first", 50.0, 1, 2)), path
    )
    assert path.read_bytes().startswith(b"\x89PNG")
