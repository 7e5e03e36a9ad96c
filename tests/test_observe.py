"""Dashboard and alerts ask for metrics and labels that kvpin has, and each alert has its runbook."""

import re
from collections import defaultdict

import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.fleet.discovery import Source
from proxy.fleet.fleet import Fleet
from proxy.observe.metrics import Metrics
from proxy.peers.bus import UnixBus
from proxy.peers.peers import Peers
from proxy.request.tenants import Tenants
from tests.fakes import add_ready
from tests.proxy.observe.test_metrics import record
from tests.queries import ALERTS, BOARD, DEPLOY, of_board, of_variables, plain

# Labels that Prometheus adds to all it scrapes; its operator adds the namespace.
OF_TARGETS = {"instance", "job", "namespace"}
QUERIES = {
    **{title: plain(query) for title, query in of_board()},
    **{each["alert"]: each["expr"] for each in ALERTS},
}


@pytest.fixture(scope="module")
def labels(tmp_path_factory):
    """Every series that a page may have, with its labels."""
    fleet, tenants = Fleet(), Tenants(())
    add_ready(fleet, "a")
    peers = Peers(UnixBus(tmp_path_factory.mktemp("x"), 1), 1, fleet, tenants)
    metrics = Metrics(fleet, {"dns": Source("dns://x", None)}, peers, tenants=1)
    done = record(
        placed=1.0, arrived=0.5, queued_s=0.1, first_byte_s=0.2, duration_s=3.0, output_tokens=9,
        reported_tokens=3, tokens_agree=False, interrupted=1, attempts=["a"],
    )  # fmt: skip
    done.tenant = "acme"
    metrics.observe(done)
    metrics.observe(record(placement=None, status=429, attempts=[]))
    found = defaultdict(set)
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            found[sample.name] |= set(sample.labels)
    found["up"] = set()  # Prometheus' own
    return {name: names | OF_TARGETS for name, names in found.items()}


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_names_metrics_and_labels_that_exist(query, labels):
    asked = []

    def check(part):
        if isinstance(part, promql_parser.VectorSelector):
            asked.append(part.name)
            assert part.name in labels
            assert {matcher.name for matcher in part.matchers.matchers} <= labels[part.name]
        if isinstance(part, promql_parser.AggregateExpr) and part.modifier is not None:
            promql_parser.walk(part.expr, lambda inner: check_by(inner, set(part.modifier.labels)))

    def check_by(part, by):
        if isinstance(part, promql_parser.VectorSelector):
            assert by <= labels[part.name]

    promql_parser.walk(promql_parser.parse(QUERIES[query]), check)
    assert asked


def test_every_list_of_the_dashboard_is_of_a_label_that_exists(labels):
    variables = [*of_variables()]
    assert variables
    for metric, label in variables:
        assert label in labels[metric]


def test_the_dashboard_is_bound_to_no_data_source_and_every_panel_is_explained():
    panels = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
    assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}
    assert all(panel["description"] for panel in panels)
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


@pytest.mark.parametrize("alert", ALERTS, ids=lambda each: each["alert"])
def test_every_alert_has_its_runbook_and_its_test(alert):
    page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    titles = re.findall(r"^#+ (.*)$", (DEPLOY.parent / page).read_text(), re.MULTILINE)
    assert alert["alert"] in titles
    assert anchor == alert["alert"].lower()
    tests = (DEPLOY / "prometheus" / "rules_test.yml").read_text()
    assert f"alertname: {alert['alert']}\n        exp_alerts:" in tests
