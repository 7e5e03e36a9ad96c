"""The files of deploy/ are what Helm, Kubernetes, Docker Compose, systemd and kvpin understand."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from helm_python import chart

from proxy.cli.main import ServeFlags
from proxy.settings import load_settings

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
CHART = str(DEPLOY / "helm" / "kvpin")
EVERYTHING = {
    "secret": "keys",
    "settings": {
        "discovery": [{"source": "kubernetes://llm/vllm:http", "kind": "vllm", "share_kv": True}],
        "model_aliases": {"gpt-4o": "qwen3"},
    },
    "rbac": {"namespaces": ["llm", "more"]},
    "serviceMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True, "docs": "https://git.example/kvpin/", "labels": {"release": "p"}},
    "dashboard": {"enabled": True},
    "engineAutoscaling": {"enabled": True, "deployment": "vllm"},
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "hosts": ["kvpin.example"],
        "tls": [{"secretName": "tls", "hosts": ["kvpin.example"]}],
    },
    "env": [{"name": "HF_ENDPOINT", "value": "https://mirror.example"}],
    "volumes": [{"name": "keys", "secret": {"secretName": "more"}}],
    "volumeMounts": [{"name": "keys", "mountPath": "/etc/keys", "readOnly": True}],
    "annotations": {"a": "of the Deployment"},
    "podAnnotations": {"b": "of pods"},
    "podLabels": {"c": "of-pods"},
    "service": {"annotations": {"d": "of the Service"}},
    "tokenizerCache": {"enabled": True, "storageClass": "fast"},
}
OPTIONAL_KINDS = {
    "HorizontalPodAutoscaler",
    "Ingress",
    "PersistentVolumeClaim",
    "PrometheusRule",
    "ServiceMonitor",
}
KINDS = {"ConfigMap", "Deployment", "PodDisruptionBudget", "Role", "RoleBinding", "Service", "ServiceAccount"}


def rendered(values):
    with chart.Chart.load(CHART) as loaded:
        texts = loaded.render(values=values, name="mine", namespace="llm")
    return [each for text in texts.values() for each in yaml.safe_load_all(text) if each]


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_the_chart_is_what_kubernetes_and_kvpin_understand(values, tmp_path):
    assert chart.lint(CHART, values, strict=True)["errors"] == []
    objects = rendered(values)
    assert {each["kind"] for each in objects} == KINDS | (OPTIONAL_KINDS if values else set())
    for each in objects:
        if each["kind"] not in ("ServiceMonitor", "PrometheusRule"):  # of the Prometheus Operator
            for version in ("1.27", "1.37"):
                kubernetes_validate.validate(each, version, strict=True)
        elif each["kind"] == "ServiceMonitor":
            key = {"name": "keys", "key": "KVPIN_METRICS_KEY"}
            assert each["spec"]["endpoints"][0]["authorization"] == {"credentials": key}
    data = {}
    for each in objects:
        data |= each["data"] if each["kind"] == "ConfigMap" else {}
    settings = data["kvpin.toml"]
    (tmp_path / "kvpin.toml").write_text(settings)
    loaded = load_settings(tmp_path / "kvpin.toml")
    assert (loaded.host, loaded.port, loaded.drain_s, loaded.reuse) == ("0.0.0.0", 8000, 15, True)
    assert len(loaded.discovery) == len(values.get("settings", {}).get("discovery", ()))
    pod = next(each for each in objects if each["kind"] == "Deployment")["spec"]["template"]["spec"]
    assert pod["enableServiceLinks"] is False  # KVPIN_PORT would be no port
    assert pod["terminationGracePeriodSeconds"] > loaded.drain_s + loaded.graceful_shutdown_s


def of_kind(kind, values):
    (found,) = [each for each in rendered(values) if each["kind"] == kind]
    return found


def test_with_tls_the_probes_and_prometheus_speak_it():
    settings = {"tls": {"cert": "/tls/tls.crt", "key": "/tls/tls.key"}}
    values = {"settings": settings, "serviceMonitor": {"enabled": True, "tlsConfig": {"serverName": "kvpin"}}}
    (container,) = of_kind("Deployment", values)["spec"]["template"]["spec"]["containers"]
    probes = [probe for name, probe in container.items() if name.endswith("Probe")]
    assert [probe["httpGet"]["scheme"] for probe in probes] == ["HTTPS"] * 3
    (endpoint,) = of_kind("ServiceMonitor", values)["spec"]["endpoints"]
    assert (endpoint["scheme"], endpoint["tlsConfig"]) == ("https", {"serverName": "kvpin"})
    assert (
        of_kind("ServiceMonitor", values | {"settings": {"tls": None}})["spec"]["endpoints"][0]["scheme"]
        == "http"
    )
    settings["tls"]["client_ca"] = "/tls/ca.crt"
    with pytest.raises(Exception, match="the kubelet's probes have no certificate"):
        rendered(values)


def test_what_is_added_to_pods_stands_beside_what_the_chart_needs():
    plain, more = (of_kind("Deployment", values) for values in ({}, EVERYTHING))
    assert more["metadata"]["annotations"] == EVERYTHING["annotations"]
    template = more["spec"]["template"]
    assert template["metadata"]["annotations"].keys() == {"checksum/settings", "b"}
    assert template["metadata"]["labels"].items() > more["spec"]["selector"]["matchLabels"].items()
    (before,), (after,) = (each["spec"]["template"]["spec"]["containers"] for each in (plain, more))
    for kind, added in (
        ("env", [{"name": "HF_HOME", "value": "/var/cache/kvpin"}, *EVERYTHING["env"]]),
        (
            "volumeMounts",
            [{"name": "tokenizers", "mountPath": "/var/cache/kvpin"}, *EVERYTHING["volumeMounts"]],
        ),
    ):
        assert after[kind] == [*before[kind], *added]
    claim = {"claimName": of_kind("PersistentVolumeClaim", EVERYTHING)["metadata"]["name"]}
    *_, cache, added = template["spec"]["volumes"]
    assert cache == {"name": "tokenizers", "persistentVolumeClaim": claim}
    assert [added] == EVERYTHING["volumes"]


def test_a_claim_that_exists_is_used():
    values = {"tokenizerCache": {"enabled": True, "claim": "mine"}}
    assert not [each for each in rendered(values) if each["kind"] == "PersistentVolumeClaim"]
    *_, cache = of_kind("Deployment", values)["spec"]["template"]["spec"]["volumes"]
    assert cache["persistentVolumeClaim"] == {"claimName": "mine"}


def test_pods_spread_over_nodes_and_what_is_spread_may_be_said():
    deployment = of_kind("Deployment", {})
    (rule,) = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert rule.pop("labelSelector") == deployment["spec"]["selector"]
    assert rule == {
        "topologyKey": "kubernetes.io/hostname",
        "maxSkew": 1,
        "whenUnsatisfiable": "ScheduleAnyway",
    }
    own = {
        "topologyKey": "zone",
        "maxSkew": 2,
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"a": "b"},
    }
    spec = of_kind("Deployment", {"topologySpreadConstraints": [own]})["spec"]["template"]["spec"]
    assert spec["topologySpreadConstraints"] == [own]
    none = of_kind("Deployment", {"topologySpreadConstraints": []})["spec"]["template"]["spec"]
    assert "topologySpreadConstraints" not in none


def test_an_ingress_leads_to_the_service_and_buffers_nothing():
    ingress, service = (of_kind(kind, EVERYTHING) for kind in ("Ingress", "Service"))
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert (rule["host"], path["path"]) == ("kvpin.example", "/")
    assert path["backend"]["service"] == {
        "name": service["metadata"]["name"],
        "port": {"name": service["spec"]["ports"][0]["name"]},
    }
    assert ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
    with pytest.raises(Exception, match=r"ingress\.hosts names the hosts of the Ingress"):
        rendered({"ingress": {"enabled": True}})


def test_the_chart_carries_dashboard_and_alerts():
    objects = rendered(EVERYTHING)
    files = DEPLOY / "helm" / "kvpin" / "files"
    board = next(each["data"]["kvpin.json"] for each in objects if "kvpin.json" in each.get("data", {}))
    assert json.loads(board) == json.loads((files / "dashboard.json").read_text())
    (rule,) = [each for each in objects if each["kind"] == "PrometheusRule"]
    assert rule["metadata"]["labels"]["release"] == "p"
    alerts = yaml.safe_load((files / "kvpin.rules.yml").read_text())["groups"][0]["rules"]
    given = rule["spec"]["groups"][0]["rules"]
    assert [each["expr"] for each in given] == [each["expr"] for each in alerts]
    links = [each["annotations"]["runbook_url"] for each in given]
    assert all(link.startswith("https://git.example/kvpin/docs/observe.md#") for link in links)


def test_what_scales_must_be_named():
    with pytest.raises(Exception, match=r"engineAutoscaling\.deployment names the engines' Deployment"):
        rendered({"engineAutoscaling": {"enabled": True}})


def test_the_image_has_no_finding_and_compose_starts_what_kvpin_understands():
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    services = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]
    kvpins = {name for name in services if name.startswith("kvpin-")}
    (command,) = {tuple(services[name]["command"]) for name in kvpins}
    engines = [text.removeprefix("--engine=") for text in command if text.startswith("--engine=")]
    (exchange,) = [text.removeprefix("--exchange=") for text in command if text.startswith("--exchange=")]
    settings = ServeFlags(reuse=True, exchange=exchange, engine=engines).settings()
    directory = settings.exchange.url.get_secret_value().removeprefix("unix:")
    assert all(f"run:{directory}" in services[name]["volumes"] for name in kvpins)
    hosts = {re.fullmatch(r"http://([a-z0-9-]+):8080", each.url)[1] for each in settings.engines}
    watching = {name for name, each in services.items() if each.get("profiles") == ["observe"]}
    assert hosts == services.keys() - kvpins - watching
    for name in watching:
        for mount in services[name]["volumes"]:
            assert (DEPLOY / mount.partition(":")[0]).exists()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_the_units(tmp_path):
    for unit in (DEPLOY / "systemd").iterdir():
        text = unit.read_text().replace("/opt/kvpin/bin/kvpin", sys.executable)
        (tmp_path / unit.name).write_text(text)
    units = sorted(str(path) for path in tmp_path.iterdir())
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
