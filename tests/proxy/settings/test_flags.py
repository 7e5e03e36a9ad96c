import pytest

from proxy.settings import SettingsError, parse_engine_flag, parse_managed_flag


def test_an_engine_with_all_its_options():
    engine = parse_engine_flag(
        "llama-server=http://127.0.0.1:8080/ , id=a,model=m,tokenizer=/models/m,api_key=s3cr=t,"
        "events=tcp://127.0.0.1:5557,host-cache-dir=/var/kv,host_cache_bytes=4GiB"
    )
    spec = engine.spec()
    assert (spec.kind, spec.url, spec.id, spec.model) == ("llama_server", "http://127.0.0.1:8080", "a", "m")
    assert (spec.tokenizer, spec.api_key, spec.events) == ("/models/m", "s3cr=t", "tcp://127.0.0.1:5557")
    assert (spec.host_cache_dir, spec.host_cache_bytes) == ("/var/kv", 4 * 2**30)
    assert "s3cr" not in repr(engine)
    assert "s3cr" not in repr(spec)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://127.0.0.1:8000", "write KIND=URL"),
        ("vllm", "write KIND=URL"),
        ("=http://x:1", "write KIND=URL"),
        ("vllm=127.0.0.1:8000", "--engine vllm=…: the address needs a scheme"),
        ("vllm=ftp://x:1", "must look like http://host:port"),
        ("vllm=http://", "must look like http://host:port"),
        ("vllm=http://u:hush@x:1", "use api_key"),
        ("vllm=http://x:1/v1?a=b", "must end with its path"),
        (
            "vllm=http://x:1,colour=red",
            "unknown option 'colour'; known: id, model, tokenizer, api_key, events",
        ),
        ("vllm=http://x:1,id=a,id=b", "option 'id' is given twice"),
        ("vllm=http://x:1,id", "option 'id' needs a value"),
        ("vllm=http://x:1,id=", "option 'id' needs a value"),
        ("vllm=http://x:1,id=a b", "id: "),
        ("vllm=http://x:1,host_cache_bytes=lots", "host_cache_bytes: "),
        ("vllm=http://x:1,host_cache_bytes=0", "host_cache_bytes: "),
        ("V LLM=http://x:1", "kind: "),
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
    llama = parse_managed_flag("llama-server: llama-server -m 'a b.gguf' --port {port} --api-key hush")
    assert llama.kind == "llama_server"
    assert llama.command[:5] == ("llama-server", "-m", "a b.gguf", "--port", "{port}")
    assert llama.spec(4711).url == "http://127.0.0.1:4711"
    assert "hush" not in repr(llama)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "write KIND: command line"),
        (": x {port}", "write KIND: command line"),
        ("llama-server -m x", "write KIND: command line"),
        ("llama_server: llama-server -m x", "the command must say {port}"),
        ("llama_server:", "the command must say {port}"),
        ("llama_server: llama-server 'x {port}", "No closing quotation"),
        ("embedded: --port 8001", "--port is chosen by kvpin"),
        ("embedded: --host=0.0.0.0", "--host is chosen by kvpin"),
    ],
)
def test_a_managed_flag_that_is_wrong_says_why(text, message):
    with pytest.raises(SettingsError) as caught:
        parse_managed_flag(text)
    assert message in str(caught.value)
