"""The queries of the dashboard and of the alerts in deploy/."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

DEPLOY = Path(__file__).parent.parent / "deploy"
BOARD = json.loads((DEPLOY / "helm/kvpin/files/dashboard.json").read_text())
ALERTS = yaml.safe_load((DEPLOY / "helm/kvpin/files/kvpin.rules.yml").read_text())["groups"][0]["rules"]


def plain(query: str, rate: str = "1m") -> str:
    """A query of the dashboard without Grafana's variables."""
    return query.replace("$__rate_interval", rate).replace("$model", ".*")


def of_board() -> Iterator[tuple[str, str]]:
    """Title of the panel and query."""
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            yield f"{panel['title']} · {target['legendFormat']}".rstrip(" ·"), target["expr"]


def of_variables() -> Iterator[tuple[str, str]]:
    """Metric and label of each list that the dashboard offers."""
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()
