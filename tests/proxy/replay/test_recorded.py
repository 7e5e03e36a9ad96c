from proxy.replay.trace import RecordedEngine, RecordedFigures, figures_of


def engine(name, tok_s=1000, **figures):
    return RecordedEngine(name, prefill=[(1024.0, 1024 / tok_s)], **figures)


def test_the_median_engine_stands_for_all():
    known = [
        engine("a", 1000, gpu_tokens=100, host_tokens=50, interference=0.1, token_s=0.02),
        engine("b", 1100, gpu_tokens=300, interference=0.3, restore_tok_s=9.0),
        engine("c", 1050, gpu_tokens=200, interference=0.2),
        RecordedEngine("unused"),
    ]
    assert figures_of(known) == RecordedFigures(
        200, 50, ((1024.0, 1024 / 1050),), interference=0.2, restore_tok_s=9.0, token_s=0.02
    )


def test_of_an_engine_that_several_kvpins_recorded_the_best_known_counts():
    told = [engine("a", 10, samples=1), engine("a", 1000, samples=90), engine("a", 500, samples=2)]
    assert figures_of(told).prefill == ((1024.0, 1.024),)
    assert figures_of(told).differ == ""


def test_engines_of_other_speeds_are_told():
    differ = figures_of([engine("a", 1000), engine("b", 2000)]).differ
    assert differ.startswith("the recorded engines differ: they compute 1,000 to 2,000 prompt tokens/s")
