"""A real Prometheus scrapes a busy kvpin. `scripts/test-prometheus` runs this and shows what it found."""

import json
import os
import socket
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.collector import collecting
from tests.live.conftest import ENGINE, running_kvpin
from tests.queries import ALERTS, DEPLOY, of_board, plain

PROGRAMS = Path(os.environ["PROMETHEUS"])
CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s, scrape_timeout: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: kvpin
    authorization: {{credentials: scrape}}
    static_configs: [{{targets: ["{target}"]}}]
"""
LOAD_S = 30
RATE = "20s"
# Panels that stay empty without a second kvpin, an overload or an engine that fails.
MAY_BE_EMPTY = (
    "Other kvpins",
    "Wait for busy",
    "Refused, tried again, broken",
    "Prompts whose tokens differ",
)


def run(program, *words):
    return subprocess.run([PROGRAMS / program, *words], capture_output=True, text=True, check=False)


def test_promtool_accepts_the_alerts_and_their_tests():
    rules = run("promtool", "check", "rules", str(DEPLOY / "helm/kvpin/files/kvpin.rules.yml"))
    assert (rules.returncode, f"{len(ALERTS)} rules found" in rules.stdout) == (0, True), rules.stderr
    tests = run("promtool", "test", "rules", str(DEPLOY / "prometheus/rules_test.yml"))
    assert tests.returncode == 0, tests.stdout + tests.stderr


def load(url, until):
    """Conversations that grow, streamed and whole."""
    with httpx.Client(base_url=url, timeout=60, headers={"authorization": "Bearer k1"}) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        system = "You are a helpful assistant. " * 20
        number = 0
        while time.monotonic() < until:
            messages = [{"role": "system", "content": system}]
            for turn in range(4):
                number += 1
                messages.append({"role": "user", "content": f"Question {turn} of talk {number // 4}?"})
                body = {"model": model, "messages": messages, "max_tokens": 16, "stream": turn % 2 == 0}
                answer = client.post("/v1/chat/completions", json=body).raise_for_status()
                text = answer.text if body["stream"] else answer.json()["choices"][0]["message"]["content"]
                messages.append({"role": "assistant", "content": text[:40]})


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """A Prometheus that has watched a kvpin for half a minute, and the spans of that time."""
    home = tmp_path_factory.mktemp("prometheus")
    (home / "kvpin.toml").write_text(
        'tenant_metrics = 5\notel = true\nmetrics_key = "scrape"\n[[api_keys]]\nkey = "k1"\ntenant = "acme"\n'
    )
    with pytest.MonkeyPatch.context() as environment, collecting() as collector:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        flags = ("--config", str(home / "kvpin.toml"), "--managed", ENGINE, "--managed", ENGINE)
        with (
            running_kvpin(home / "kvpin.log", *flags) as kvpin,
            socket.create_server(("127.0.0.1", 0)) as free,
        ):
            port = free.getsockname()[1]
            free.close()
            rules, target = DEPLOY / "helm/kvpin/files/kvpin.rules.yml", kvpin.url.removeprefix("http://")
            (home / "prometheus.yml").write_text(CONFIG.format(rules=rules, target=target))
            words = (
                f"--config.file={home}/prometheus.yml",
                f"--storage.tsdb.path={home}/data",
                f"--web.listen-address=127.0.0.1:{port}",
                "--enable-feature=exemplar-storage",
            )
            with (home / "log").open("wb") as log:
                process = subprocess.Popen([PROGRAMS / "prometheus", *words], stdout=log, stderr=log)
            try:
                threads = [
                    threading.Thread(target=load, args=(kvpin.url, time.monotonic() + LOAD_S))
                    for _ in range(2)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", trust_env=False) as client:
                    yield client
            finally:
                process.terminate()
                process.wait(30)
    print("\n\nThe last trace as the collector got it:\n")
    print("\n".join([*traces(collector).values()][-1]))


def traces(collector):
    """Lines of each trace, by its id."""
    lines, begun = {}, {}
    for depth, span in collector.tree():
        start = begun.setdefault(span.trace_id, span.start)
        at, took = (span.start - start) / 1e6, (span.end - span.start) / 1e6
        facts = " ".join(f"{name}={value}" for name, value in span.attributes.items())
        line = f"{'  ' * depth}{span.name:<{30 - 2 * depth}} {at:7.2f} {took:8.2f} ms  {facts}"
        lines.setdefault(span.trace_id, []).append(line)
    return lines


def test_every_panel_has_values(prometheus):
    print("\n\nPanel · series                                               values")
    empty = []
    for title, query in of_board():
        answer = prometheus.get("/query", params={"query": plain(query, RATE)})
        assert answer.status_code == 200, answer.text
        values = [(each["metric"], float(each["value"][1])) for each in answer.json()["data"]["result"]]
        shown = ", ".join(f"{'/'.join(labels.values())} {value:.4g}".strip() for labels, value in values[:4])
        print(f"{title[:60]:<60} {shown or '–'}")
        if not values:
            empty.append(title)
    assert [title for title in empty if not title.startswith(MAY_BE_EMPTY)] == []


def test_every_rule_is_evaluated(prometheus):
    (group,) = prometheus.get("/rules").json()["data"]["groups"]
    print("\n\nAlert                    health    state")
    for rule in group["rules"]:
        print(f"{rule['name']:<24} {rule['health']:<9} {rule['state']}")
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    assert "firing" not in {rule["state"] for rule in group["rules"]}


def test_exemplars_lead_to_traces(prometheus):
    query = {
        "query": "kvpin_time_to_first_token_seconds_bucket",
        "start": time.time() - 300,
        "end": time.time(),
    }
    found = prometheus.get("/query_exemplars", params=query).json()["data"]
    ids = {each["labels"]["trace_id"] for series in found for each in series["exemplars"]}
    print(f"\n\n{len(ids)} exemplars, such as {json.dumps(found[0]['exemplars'][0])}")
    assert ids
