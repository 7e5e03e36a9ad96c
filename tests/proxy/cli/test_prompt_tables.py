import json

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

pytestmark = pytest.mark.live
HIDDEN, VOCABULARY = 256, 4096


@pytest.fixture
def tables(kvpin, live_proxy):
    """Runs a command on prompt tables: `tables("list")`."""
    return lambda *words: kvpin("tables", *words, "--url", live_proxy, "--admin-key", "secret")


@pytest.fixture
def table_file(tmp_path):
    path = tmp_path / "table.safetensors"
    save_file({"t": np.random.default_rng(5).normal(0, 0.02, (16, HIDDEN)).astype(np.float32)}, path)
    return str(path)


def test_a_table_from_put_to_delete(tables, table_file, live_proxy):
    put = tables("put", table_file, "--id", "mine", "--extra-id", "77")
    assert (put.exit_code, put.stdout) == (0, "registered mine: 16 rows of 256 values\n")
    listed = json.loads(tables("list", "--json").stdout)["prompt_tables"]
    mine = next(table for table in listed if table["table_id"] == "mine")
    assert (mine["extra_id"], mine["rows"], mine["hidden"]) == (77, 16, HIDDEN)
    assert json.loads(tables("show", "mine", "--json").stdout) == mine
    assert '"prompt_table": "mine"' in tables("show", "mine").stdout
    ids = [*range(VOCABULARY, VOCABULARY + 16), 100, 101]
    body = {"model": "kvpin-tiny", "prompt": ids, "max_tokens": 1, "prompt_table": "mine"}
    answer = httpx.post(f"{live_proxy}/v1/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert tables("delete", "mine").stdout == "deleted mine\n"
    assert "mine" not in tables().stdout


def test_the_name_comes_from_the_content(tables, table_file):
    table = json.loads(tables("put", table_file, "--json").stdout)
    assert table["table_id"] == f"pt-{table['extra_id']:016x}"
    assert f" {table['extra_id']}" in tables("list").stdout
    assert tables("delete", table["table_id"]).exit_code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("put", "gone.safetensors"), "'gone.safetensors' cannot be read: No such file or directory"),
        (("put", __file__), "safetensors"),
        (("show", "nobody"), "there is no prompt table 'nobody'"),
        (("delete", "nobody"), "nobody"),
        (("delete", "../engines/e0"), "(404)"),
    ],
)
def test_bad_input_is_one_sentence(tables, words, said):
    result = tables(*words)
    assert (result.exit_code, result.stdout) == (1, "")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("kvpin: ")


def test_bad_ids(tables, table_file):
    assert "--extra-id must be an integer" in tables("put", table_file, "--extra-id", "0").stderr
    assert "--id must be 1 to 128 letters" in tables("put", table_file, "--id", "a b").stderr


@pytest.mark.parametrize("group", ["tables", "engines"])
def test_an_address_before_the_command_is_not_lost(kvpin, group, live_proxy):
    result = kvpin(group, "--url", live_proxy, "list" if group == "tables" else "drain", "e0")
    assert (result.exit_code, result.stderr) == (
        1,
        f"kvpin: write --url after {'list' if group == 'tables' else 'drain'}\n",
    )
