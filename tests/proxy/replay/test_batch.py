import pytest

from proxy.replay.batch import run_all
from proxy.replay.engine import EngineModel
from proxy.replay.simulator import Run
from proxy.replay.trace import read_trace
from tests.proxy.replay.making import TRACES, ask, model_of, trace_of


def test_processes_come_to_the_same():
    trace = read_trace(TRACES / "agents.jsonl.gz")
    runs = [Run(policy, 2, EngineModel(200_000), 4.0) for policy in ("kvpin", "sticky", "oracle")]
    alone, beside = [], []
    here = run_all(trace, runs, progress=alone.append)
    assert run_all(trace, runs, jobs=2, progress=beside.append) == here
    assert [outcome.run for outcome in here] == runs
    assert sum(alone) == 400
    assert beside == [200] * 3


def test_what_cannot_be_run_is_told_from_processes_too():
    runs = [Run(policy, 2, model_of(1)) for policy in ("kvpin", "sticky")]
    with pytest.raises(ValueError, match="no request of the trace fits"):
        run_all(trace_of(ask((1, 2))), runs, jobs=2)
