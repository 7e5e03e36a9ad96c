from contextlib import nullcontext

import pytest

from proxy.replay import batch
from proxy.replay.batch import run_all
from proxy.replay.simulated_engine import EngineModel
from proxy.replay.simulator import ReplayRun
from proxy.replay.trace import read_trace
from tests.proxy.replay.making import TRACES, ask, chats, model_of, trace_of


def test_processes_come_to_the_same():
    trace = read_trace(TRACES / "agents.jsonl.gz")
    runs = [ReplayRun(policy, 2, EngineModel(200_000), 4.0) for policy in ("kvpin", "sticky", "oracle")]
    alone, beside = [], []
    here = run_all(trace, runs, progress=alone.append)
    assert run_all(trace, runs, jobs=2, progress=beside.append) == here
    assert [outcome.run for outcome in here] == runs
    assert sum(alone) == sum(beside) == 600


def test_a_process_counts_what_it_has_served_before_its_run_ends(monkeypatch):
    trace, counts = chats(100, 10, seed=1), []

    class Counter:
        value = 0

        def get_lock(self):
            counts.append(self.value)
            return nullcontext()

    monkeypatch.setattr(batch, "_given", [])
    batch._take(trace, served := Counter())
    batch._run(ReplayRun("round-robin", 2, model_of(1000)))
    assert counts == [0, 256, 512, 768]
    assert served.value == len(trace.requests) == 1000


def test_what_cannot_be_run_is_told_from_processes_too():
    runs = [ReplayRun(policy, 2, model_of(1)) for policy in ("kvpin", "sticky")]
    with pytest.raises(ValueError, match="no request of the trace fits"):
        run_all(trace_of(ask((1, 2))), runs, jobs=2)
