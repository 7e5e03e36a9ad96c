"""What `kvpin doctor` shows; all of it, as the documentation quotes it: tests/test_documentation.py."""

import pytest

from proxy.cli.engine_check.display import show_examination

FOUND = {
    "kind": "vllm", "version": "", "detected": False, "role": "both", "model": "m", "models": {}, "loras": [],
    "max_model_len": None,
    "tokens_per_block": None, "gpu_blocks": 5, "host_blocks": None, "running": 0, "waiting": 0, "can": [],
    "cannot": {"pin": "restart it", "offload": "add LMCache"}, "view": {"detail": "[none]"},
    "tokenisation": {"detail": "here", "forms": {}}, "probe": None, "findings": [],
    "unseen": None,
}  # fmt: skip


def shown(capsys, **fields):
    show_examination(FOUND | fields)
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_an_engine_without_findings(capsys):
    lines = shown(capsys)
    assert lines[:4] == ["engine vllm", "model m", "blocks 5 on gpu", "load 0 running, 0 waiting"]
    assert lines[4:6] == ["cannot pin: restart it", "offload: add LMCache"]
    assert "events [none]" in lines
    assert lines[-1] == "no findings"


def test_the_role_that_the_operator_named_is_shown(capsys):
    assert shown(capsys, role="prefill")[1] == "role prefill"


def test_findings_are_numbered_each_with_its_remedy(capsys):
    findings = [{"problem": "slow", "remedy": "--fast"}, {"problem": "odd", "remedy": ""}]
    assert shown(capsys, findings=findings)[-4:] == ["1. slow", "→ --fast", "", "2. odd"]


@pytest.mark.parametrize(("error", "is_shown"), [(None, True), ("refused", False)])
def test_a_probe_that_failed_is_a_finding_and_no_comparison(capsys, error, is_shown):
    probe = {"error": error, "reported": 48, "n_tokens": 49, "predicted": 48}
    compared = "probe sent twice: the engine reports 48 of 49 tokens reused, kvpin predicted 48"
    assert (compared in shown(capsys, probe=probe)) is is_shown


def test_the_models_of_a_router_are_listed_with_their_states(capsys):
    unseen = "the models themselves were not looked at"
    assert shown(capsys, model="", models={"a": "loaded", "b": "failed"}, unseen=unseen) == [
        "engine vllm",
        "router a: loaded",
        "b: failed",
        "each is an engine of its own: name one to examine it, as kind=URL,model=NAME",
        "",
        "no findings; but the models themselves were not looked at",
    ]


def test_what_was_not_looked_at_is_said_beside_findings(capsys):
    findings = [{"problem": "slow", "remedy": "--fast"}]
    assert shown(capsys, findings=findings, unseen="the model is unloaded")[-2:] == [
        "",
        "the model is unloaded",
    ]
