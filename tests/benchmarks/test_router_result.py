import pytest

SILENT = {"requests": 0, "busy_s": 0.0, "cpu_s": 0.0, "first_token_s": []}


@pytest.fixture
def made():
    import router_result

    return router_result


@pytest.fixture
def summarised(made):
    from router_client import Answer

    def summarise(*answers):
        engines = [made.EngineRecord(**SILENT), made.EngineRecord(**SILENT | {"requests": len(answers)})]
        reading = made.Reading(engines, 0.0, 0.0, 0.0, 1.0)
        return made.summarise("a", "direct", 1, 10.0, [Answer(*each) for each in answers], (reading, reading))

    return summarise


def test_quantiles_are_by_rank(summarised):
    result = summarised(*[(n / 100_000, n / 1000) for n in range(1, 101)])
    assert (result.median_ms, result.p99_ms, result.late_ms) == pytest.approx((50, 99, 0.99))


def test_a_run_without_an_answer_has_no_times(summarised):
    result = summarised((0.0, None, 0, 0, "refused"))
    assert (result.mean_ms, result.median_ms, result.p99_ms, result.errors) == (0, 0, 0, 1)


def test_the_table_shows_how_late_the_client_was(made, summarised):
    table = made.table("t", [summarised((0.0123, 0.5))])
    shown = {column.header: list(column.cells) for column in table.columns}
    assert (shown["late p99"], shown["mean"]) == (["12.3"], ["500.0"])
