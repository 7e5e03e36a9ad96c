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


def test_a_file_without_faults(check):
    engines = "".join(f'[[engines]]\nkind = "vllm"\nurl = "http://gpu-{n}:8000"\n' for n in (1, 2))
    result = check(f'reuse = true\n{engines}[[api_keys]]\nkey = "k"\n')
    assert (result.exit_code, result.stderr) == (0, "")
    assert "kvpin.toml: no faults; engines: 2, engines to start: 0, sources of engines: 0" in result.stdout
    assert "API keys: 1, reuse: on" in result.stdout


def test_without_torch_only_engines_that_the_settings_name_need_it(kvpin, check, monkeypatch):
    """Those that `kvpin serve` would start without any are not named: its flags may name others."""
    monkeypatch.setattr("engine_adapter.registry.find_spec", lambda _: None)
    for result in (kvpin("config", "check"), check("reuse = true")):
        assert (result.exit_code, result.stderr) == (0, "")
    result = check('[[managed]]\nkind = "embedded"\n')
    assert result.exit_code == 2
    assert "embedded engines need torch" in result.stderr


def test_every_fault_in_a_sentence(check):
    text = "prot = 1\nport = 99999\nretries = -1\n[limits]\nbody_bites = 1\n"
    text += '[[engines]]\nkind = "vllm"\nur = "x"\n'
    env = {"KVPIN_RETRIE": "1", "ENABLE_KV_CACHE_REUSE": "maybe", "KVPIN_ADMIN_KEY": "secret"}
    result = check(text, env=env)
    assert (result.exit_code, result.stdout) == (2, "")
    lines = result.stderr.splitlines()
    for said in (
        "unknown setting 'prot' in",
        "unknown setting 'limits.body_bites'",
        "unknown setting 'engines[0].ur'",
        "unknown environment variable 'KVPIN_RETRIE': did you mean 'KVPIN_RETRIES'?",
        "environment variable ENABLE_KV_CACHE_REUSE is 'maybe'",
        "setting 'port' (in",
        "setting 'retries' (in",
        "setting 'engines[0].url' (in",
    ):
        assert sum(said in line for line in lines) == 1, (said, lines)
    assert len(lines) == 8
    assert all(line.startswith("kvpin: ") for line in lines)


def test_one_kind_of_fault_hides_no_other(check):
    text = 'host = "0.0.0.0"\nmetrics_key = "short"\n[tls]\ncert = "/no/cert.pem"\n'
    text += "".join(f'[[api_keys]]\nkey = "one"\nexpires = 2020-01-0{n}T00:00:00Z\n' for n in (1, 2))
    result = check(text)
    assert (result.exit_code, result.stdout) == (2, "")
    said = result.stderr.splitlines()
    assert "api_keys[0] and api_keys[1] have the same key" in said[0]
    assert "metrics_key needs at least 16 characters" in said[1]
    assert "tls.cert: '/no/cert.pem' cannot be read" in said[2]
    assert ["has expired" in line for line in said[3:]] == [True, True]


def test_what_this_machine_lacks(check, tmp_path):
    managed = '[[managed]]\nkind = "llama_server"\ncommand = "/no/llama-server -m m.gguf"\n'
    broken = tmp_path / "engines.toml"
    broken.write_text("engine = 1")
    result = check(f'engines_file = "{broken}"\n{managed}[tls]\ncert = "/no/cert.pem"\n')
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert "engine 'llama_server-0'" in lines[0]
    assert "tls.cert: '/no/cert.pem' cannot be read" in lines[1]
    assert "unknown setting 'engine'" in lines[2]


@pytest.mark.parametrize(
    ("text", "said"), [("port = ", "is not TOML"), (None, "cannot be read: No such file or directory")]
)
def test_a_file_that_cannot_be_read(kvpin, tmp_path, text, said):
    path = tmp_path / "kvpin.toml"
    if text is not None:
        path.write_text(text)
        path.chmod(0o600)
    result = kvpin("config", "check", env={"KVPIN_CONFIG": str(path)})
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_what_serve_refuses(check, kvpin, tmp_path):
    managed = '[[managed]]\nkind = "embedded"\ncommand = "--modle x"\n'
    result = check(f'{managed}[[engines]]\nkind = "vlm"\nurl = "ftp://x"\n')
    assert result.exit_code == 2
    said = result.stderr.splitlines()
    assert "unknown engine kind 'vlm': did you mean" in said[0]
    assert "setting 'engines[0].url'" in said[1]
    assert "no such option: --modle" in said[2]
    served = kvpin("serve", "--config", str(tmp_path / "kvpin.toml"))
    assert (served.exit_code, served.stderr) == (2, result.stderr)
    result = check('[exchange]\nurl = "unix:/x"\n')
    assert result.exit_code == 2
    assert result.stderr == "kvpin: exchange needs reuse: without reuse kvpin does not read prompts\n"


def test_engines_that_contradict_each_other(check, tmp_path):
    entry = f'[[engines]]\nkind = "llama_server"\nhost_cache_dir = "{tmp_path}"\n'
    sizes = (f'url = "http://gpu-{n}"\nhost_cache_bytes = "{n}GiB"\n' for n in (1, 2))
    result = check("".join(entry + each for each in sizes))
    assert result.exit_code == 2
    assert "'llama_server-1' and another one share" in result.stderr


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


def test_engines_that_several_tenants_may_not_use_are_warned_of(check):
    kinds = ("vllm", "llama_server", "openai_compatible")
    text = "".join(f'[[engines]]\nkind = "{kind}"\nurl = "http://{n}:80"\n' for n, kind in enumerate(kinds))
    text += '[[engines]]\nkind = "llama_server"\nurl = "http://3:80"\nshare_kv = true\n'
    text += '[[api_keys]]\nkey = "one"\ntenant = "a"\n'
    assert check(text).stderr == ""
    said = check(text + '[[api_keys]]\nkey = "two"\ntenant = "b"\n').stderr.splitlines()
    assert [line.split(":")[2].split()[0] for line in said] == ["engine"] * 2
    assert "start the server with --cache-ram 0; or let them share it" in said[0]
    assert "such an engine never does" in said[1]


def test_a_host_without_an_address_is_a_fault(check):
    result = check('host = "127.0.0.1,no.such.host.invalid"')
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(
        "kvpin: host: 'no.such.host.invalid' has no address that kvpin could listen on: "
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "127.0.0.1,10.0.0.1"])
def test_a_port_that_anyone_may_use_is_warned_of(check, host):
    is_open = "0.0.0.0" in host or "10." in host
    said = check(f'host = "{host}"\n').stderr
    assert ("anyone may use these engines; set --api-key" in said) is is_open
    assert check(f'host = "{host}"\n[[api_keys]]\nkey = "one"\n').stderr == ""


def test_reasoning_that_each_worker_keeps_for_itself_is_warned_of(check):
    text = '[[normalise]]\nrules = ["reasoning_kept"]\n'
    assert check(text).stderr == ""
    assert "normalise[0] has reasoning_kept: each worker" in check("workers = 2\n" + text).stderr


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


def test_a_damaged_key_book_and_an_admin_key_that_was_issued_are_faults(check, tmp_path):
    issued = IssuedKey("key-1", "t", hashlib.sha256(b"mine").digest(), "mine", 0.0)
    KeyBookFile(tmp_path).add([issued])
    result = check(f'state_dir = "{tmp_path}"\nadmin_key = "mine"\n')
    assert result.exit_code == 2
    assert result.stderr == "kvpin: admin_key must differ from every key that the admin API issued\n"
    (tmp_path / "keys").write_bytes(b"x")
    result = check(f'state_dir = "{tmp_path}"\n')
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "it is damaged" in result.stderr
