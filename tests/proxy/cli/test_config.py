import hashlib

import pytest

from proxy.core.books import IssuedKey
from proxy.fleet.state_files import KeyBookFile


@pytest.fixture
def check(kvpin, tmp_path):
    """Checks a settings file with this text."""

    def run(text, **options):
        path = tmp_path / "kvpin.toml"
        path.write_text(text)
        path.chmod(0o600)
        return kvpin("config", "check", "--config", str(path), **options)

    return run


def test_without_torch_only_engines_that_the_settings_name_need_it(kvpin, check, monkeypatch):
    """Those that `kvpin serve` would start without any are not named: its flags may name others."""
    monkeypatch.setattr("engine_adapter.registry.find_spec", lambda _: None)
    for result in (kvpin("config", "check"), check("reuse = true")):
        assert (result.exit_code, result.stderr) == (0, "")
    result = check('[[managed]]\nkind = "embedded"\n')
    assert result.exit_code == 2
    assert "embedded engines need torch" in result.stderr


def test_keys_that_open_nothing_are_warned_of_without_the_key(check, tmp_path):
    engines = "".join(
        f'[[engines]]\nkind = "vllm"\nurl = "http://gpu-{n}:8000"\nmodel = "m{n}"\n' for n in (1, 2)
    )
    keys = (
        '[[api_keys]]\nkey = "the-secret"\ntenant = "acme"\nmodels = ["m1", "fast", "m3"]\n'
        '[[api_keys]]\nkey = "other-secret"\ntenant = "acme"\nexpires = 2020-01-31T00:00:00Z\n'
    )
    issued = [
        IssuedKey(f"key-{n}", "t", b"%d" % n, "last", 0.0, expires=1.0, removed=float(n == 2)) for n in (1, 2)
    ]
    KeyBookFile(tmp_path).add(issued)
    text = f'state_dir = "{tmp_path}"\n{engines}{keys}[model_aliases]\nfast = "m2"\n'
    result = check(text)
    assert result.exit_code == 0
    assert "no faults" in result.stdout
    key, said = "kvpin: warning: api_keys[{}] (tenant 'acme')", result.stderr.splitlines()
    assert said == [
        f"{key.format(0)} is for 'm3': no engine and no alias has this name; is it a LoRA adapter?",
        f"{key.format(1)} has expired: every request with it is refused; take it out",
        "kvpin: warning: the issued key key-1 has expired: kvpin keys remove key-1",
    ]
    result = check(text.replace('model = "m1"', ""))  # only the engine can tell
    assert "'m3'" not in result.stderr


def test_a_host_without_an_address_is_a_fault(check):
    result = check('host = "127.0.0.1,no.such.host.invalid"')
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(
        "kvpin: host: 'no.such.host.invalid' has no address that kvpin could listen on: "
    )


def test_rules_that_change_nothing_are_warned_of(check, tmp_path):
    KeyBookFile(tmp_path).add(
        IssuedKey(f"key-{t}", t, t.encode(), "last", 0.0, removed=float(t == "gone"))
        for t in ("mine", "gone")
    )
    text = f'state_dir = "{tmp_path}"\n[[engines]]\nkind = "vllm"\nurl = "http://gpu-1:8000"\nmodel = "m1"\n'
    text += '[[api_keys]]\nkey = "the-secret"\ntenant = "acme"\n[model_aliases]\nfast = "m1"\n'
    for tenant in ("acme", "mine", "gone", "agnets"):
        text += f'[[normalise]]\nrules = ["paths"]\ntenant = "{tenant}"\n'
    for model in ("m1", "fast", "qwen"):
        text += f'[[normalise]]\nrules = ["paths"]\nmodel = "{model}"\n'
    entry = "kvpin: warning: normalise[{}] is for {}"
    assert check(text).stderr.splitlines() == [
        entry.format(2, "tenant 'gone': no key is of this tenant"),
        entry.format(3, "tenant 'agnets': no key is of this tenant"),
        entry.format(6, "'qwen': no engine and no alias has this name; is it a LoRA adapter?"),
    ]


def test_an_admin_key_that_was_issued_is_a_fault(check, tmp_path):
    issued = IssuedKey("key-1", "t", hashlib.sha256(b"mine").digest(), "mine", 0.0)
    KeyBookFile(tmp_path).add([issued])
    result = check(f'state_dir = "{tmp_path}"\nadmin_key = "mine"\n')
    assert result.exit_code == 2
    assert result.stderr == "kvpin: admin_key must differ from every key that the admin API issued\n"
