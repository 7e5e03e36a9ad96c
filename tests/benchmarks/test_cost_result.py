"""Tables of router_cost.py: quantiles, and marks of missed goals."""


def cells_of(text, title):
    """The cells of a row of the first table that has it."""
    row = next(line for line in text.splitlines() if line.startswith(f"| {title} |"))
    return [cell.strip() for cell in row.split("|")[2:-1]]


def test_the_best_repeat_counts_and_a_missed_goal_is_marked(script):
    given = [
        ("kvpin", "small c1", "first", 300.0),
        ("kvpin", "small c1", "first", 249.6),
        ("kvpin", "long c1", "first", 1001.0),
        ("kvpin", "long c1", "next", 400.0),
        ("nginx", "small c1", "first", 9999.0),
    ]
    figures = [
        script.Figure(router, load, turn, 100, cpu_us, 1, 2, 10.0, 5.0, 0.25)
        for router, load, turn, cpu_us in given
    ]
    text = script.markdown(script.Figures(figures, [], {}, []))
    assert cells_of(text, "kvpin, reuse on, new chats") == ["250", "1,001 ✗"]
    assert cells_of(text, "kvpin, reuse on, next turns") == ["–", "400"]
    assert cells_of(text, "nginx") == ["9,999", "–"]
    assert cells_of(text, "goal, new chats") == ["≤ 250", "≤ 1,000"]
    assert cells_of(text, "goal, next turns") == ["≤ 250", "≤ 400"]
    assert "marks a missed goal of kvpin: 1." in text
