import pytest

from proxy.settings import (
    ManagedSettings,
    SettingsError,
    is_command_line,
    parse_alias_flags,
    parse_engine_flag,
    parse_managed_flag,
)


def test_an_engine_with_all_its_options():
    engine = parse_engine_flag(
        "llama-server=http://127.0.0.1:8080/ , id=a,model=m,tokenizer=/models/m,api_key=s3cr=t,"
        "ca=/ca.pem,headers=X-Team: hush,host-cache-dir=/mem/kv,host_cache_bytes=4GiB,"
        "disk-cache-dir=/var/kv,disk_cache_bytes=1TiB"
    )
    spec = engine.spec()
    assert (spec.kind, spec.url, spec.id, spec.model) == ("llama_server", "http://127.0.0.1:8080", "a", "m")
    assert (spec.tokenizer, spec.api_key, spec.ca) == ("/models/m", "s3cr=t", "/ca.pem")
    assert spec.headers == {"X-Team": "hush"}
    assert (spec.options.host_cache_dir, spec.options.host_cache_bytes) == ("/mem/kv", 4 * 2**30)
    assert (spec.options.disk_cache_dir, spec.options.disk_cache_bytes) == ("/var/kv", 2**40)
    assert "s3cr" not in f"{engine!r} {spec!r}"
    assert "hush" not in f"{engine!r} {spec!r}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://127.0.0.1:8000", "write KIND=URL"),
        ("localhost:8000", "or 'KIND: command line', e.g. 'llama-server: -m model.gguf'"),
        ("=http://x:1", "write KIND=URL"),
        ("vllm=127.0.0.1:8000", "--engine vllm=…: the address needs a scheme"),
        ("vllm=ftp://x:1", "must look like http://host:port"),
        ("vllm=http://u:hush@x:1", "use api_key"),
        ("vllm=http://x:1/v1?a=b", "must not have a query"),
        ("vllm=http://x:1,colour=red", "known: id, model, tokenizer, api_key, headers, ca, cert, key, "),
        ("vllm=http://x:1,id=a,id=b", "option 'id' is given twice"),
        ("vllm=http://x:1,id", "option 'id' needs a value"),
        ("llama-server=http://x:1,host_cache_bytes=lots", "host_cache_bytes: expected a number of bytes"),
        ("vllm=http://x:1,host_cache_bytes=1", "unknown option 'host_cache_bytes'"),
        ("http://x:1", "`kvpin doctor http://x:1` says which kind it is"),
        ("vllm=http://x:1,dp_rank=-1", "dp_rank: must be a whole number of at least 0"),
        ("vllm=http://x:1,headers=hush", "headers: write a header as 'Name: value'"),
        ("vllm=http://x:1,role=prefil", "role: "),
        ("sglang=http://x:1,role=prefill", "sglang engines cannot have role=prefill: each server says "),
    ],
)
def test_an_engine_flag_that_is_wrong_says_why(text, message):
    with pytest.raises(SettingsError) as caught:
        parse_engine_flag(text)
    assert message in str(caught.value)
    assert "hush" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_managed_engines():
    embedded = parse_managed_flag("embedded: --kv-blocks 512 --served-model-name 'my model'")
    assert embedded.command == ("--kv-blocks", "512", "--served-model-name", "my model")
    assert parse_managed_flag("embedded").command == ()
    llama = parse_managed_flag("llama-server: -m 'a b.gguf' -np 4 --api-key hush")
    assert llama.kind == "llama_server"
    assert llama.command == ("-m", "a b.gguf", "-np", "4", "--api-key", "hush")
    assert llama.spec(4711).url == "http://127.0.0.1:4711"
    assert "hush" not in repr(llama)
    vllm = parse_managed_flag("vllm: vllm serve qwen3 --port {port}", flag="--engine")
    assert vllm.command == ("vllm", "serve", "qwen3", "--port", "{port}")


def test_a_tilde_is_the_home_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    flag = parse_managed_flag("llama-server: -m ~/model.gguf --lora '~/a b.gguf' -p ~ x~/y")
    assert flag.command == ("-m", "/home/me/model.gguf", "--lora", "/home/me/a b.gguf", "-p", "~", "x~/y")
    listed = ManagedSettings(kind="vllm", command=["~/bin/vllm", "serve", "--port", "{port}"])
    assert listed.command[0] == "/home/me/bin/vllm"


@pytest.mark.parametrize(
    ("text", "starts_one"),
    [
        ("llama-server: -m model.gguf -np 4", True),
        ("llama-server:-m model.gguf", True),
        ("embedded:", True),
        ("embedded: --default-model http://x=y", True),
        ("vllm: vllm serve a=b --port {port}", True),
        ("vllm=http://127.0.0.1:8000", False),
        ("vllm=http://x:1,model=a: b", False),
        ("http://127.0.0.1:8000", False),
        ("127.0.0.1: 8000", False),
        ("", False),
    ],
)
def test_a_command_line_is_told_from_an_address(text, starts_one):
    assert is_command_line(text) is starts_one


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "write KIND: command line"),
        (": x {port}", "write KIND: command line"),
        ("llama-server -m x", "write KIND: command line"),
        ("vllm: vllm serve x", "--managed 'vllm': the command must say {port}"),
        ("vllm:", "the command must say {port}"),
        ("vllm: vllm serve 'x {port}", "No closing quotation"),
        ("llama_server: llama-server -np 4", "the command names no model"),
        ("llama-server: -m x --port {port}", "--port is chosen by kvpin"),
        ("embedded: --port 8001", "--port is chosen by kvpin"),
        ("embedded: --host=0.0.0.0", "--host is chosen by kvpin"),
        ("llama-server: -m m -c 4096,cache_reuse=256", "cache_reuse=… is a setting of kvpin, and no word of"),
    ],
)
def test_a_managed_flag_that_is_wrong_says_why(text, message):
    with pytest.raises(SettingsError) as caught:
        parse_managed_flag(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["qwen3"], "--model-alias 'qwen3': write NAME=MODEL"),
        (["=m"], "write NAME=MODEL"),
        (["a="], "write NAME=MODEL"),
        (["a=m", "a=n"], "--model-alias 'a' is given twice"),
    ],
)
def test_what_is_no_alias(texts, said):
    with pytest.raises(SettingsError, match=said):
        parse_alias_flags(texts)
