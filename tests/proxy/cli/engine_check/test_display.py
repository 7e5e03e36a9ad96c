"""What `kvpin doctor` shows; all of it, as the documentation quotes it: tests/test_documentation.py."""

import pytest

from proxy.cli.engine_check import show_examination

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


@pytest.mark.parametrize(("error", "is_shown"), [(None, True), ("refused", False)])
def test_a_probe_that_failed_is_a_finding_and_no_comparison(capsys, error, is_shown):
    probe = {"error": error, "reported": 48, "n_tokens": 49, "predicted": 48}
    compared = "probe sent twice: the engine reports 48 of 49 tokens reused, kvpin predicted 48"
    assert (compared in shown(capsys, probe=probe)) is is_shown
