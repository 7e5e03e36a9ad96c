"""What answers of kvpin look like on a terminal: shown.txt."""

from functools import partial
from pathlib import Path

from rich.console import Console

from proxy import api
from proxy.cli import decisions
from proxy.cli.answer_tables import show_engines, show_keys, show_stats, show_usage
from proxy.cli.decisions import TopView, show_request, show_requests, show_route
from proxy.cli.engine_check import show_examination
from proxy.cli.grid import TerminalTable
from proxy.cli.replay_run import table_of
from proxy.control.explain import CostAnswer
from proxy.core import reasons
from proxy.core.placement.decision import TERMS, Cost
from proxy.replay.report import COLUMNS
from tests.golden import check_golden

# --- placements of requests

WHY = "e1 holds 3,200 of [4,000] tokens, but 1.9 s of prefill wait there"


def cost(engine, **terms):
    names = ("queue", "room", "restore", "prefill", "interference", "congestion", "later", "regret", "total")
    nothing = {f"{name}_s": 0.0 for name in names}
    return nothing | {"engine": engine, "cached_tokens": 0, "in_flight": 0} | terms


COSTS = [
    cost("e1", cached_tokens=131_072, queue_s=23.4564, prefill_s=0.2, regret_s=None, total_s=24.5),
    cost("tensorrt_llm-12", prefill_s=1.0, congestion_s=3.0, total_s=4.0, interference_s=0.0042),
]
DECISION = {"rule": "lowest cost", "why": WHY, "utilisation": 0.75, "strain": 4.0}
ROUTE = DECISION | {"engine": "tensorrt_llm-12", "n_tokens": 4000, "candidates": COSTS, "is_firm": True}
LOADS = [cost("e0", in_flight=2), cost("e1", in_flight=3)]
PAIR = [
    cost("d", transfer_s=0.0, stall_s=0.5, total_s=4.0),
    cost("d", prefiller="p", transfer_s=0.05, stall_s=0.0, total_s=2.0),
]
ROUTES = {
    "a wait for room": {"candidates": [COSTS[0], COSTS[1] | {"room_s": 0.7}]},
    "of load alone": {"rule": "least loaded", "engine": "e0", "n_tokens": None, "candidates": LOADS},
    "a pair": {"engine": "d", "candidates": PAIR},
    "a note, and a prediction that is not firm": {"note": "no [tenant]", "is_firm": False},
}
REQUEST = {
    "started": 1_800_000_000.5, "tenant": "acme", "model": "qwen", "route": "/v1/chat/completions",
    "request_id": "r[1]", "engine": "tensorrt_llm-12", "status": 200, "error": None, "cause": "answered",
    "n_tokens": 4000, "predicted_tokens": 0, "is_firm": True, "reported_tokens": 0, "stream": True,
    "expected_first_token_s": 1.0, "first_byte_s": 1.01, "duration_s": 1.5, "explanation": "why [bold]",
    "divergence": None, "prefilled_by": None, "transfer": None, "miss": "input_changed",
    "differs_at": "messages[1], character 17", "queued_s": None, "first_byte_parts": None,
    "decision": DECISION | {"costs": COSTS},
}  # fmt: skip
PARTS = {"first_byte_parts": {"tokenise": 0.01, "hold": 1.7, "engine": 0.05}}
NOT_PLACED = {"decision": None, "status": None, "engine": None, "miss": None, "n_tokens": None}


def beside(text, other_text):
    divergence = {"request_id": "r0", "common_tokens": 3, "text": text, "other_text": other_text}
    return NOT_PLACED | {"divergence": divergence}


REQUESTS = {
    "placed": {},
    "a whole answer, and the end of an earlier prompt": PARTS | {"stream": False} | beside("and on", ""),
    "no first byte, and the same prompt": PARTS | {"first_byte_s": None} | beside("", ""),
    "no first token was expected": {"expected_first_token_s": None} | beside(None, None),
    "no text is markup": beside("[/x]", "[red]y") | {"error": "bad [/] tag", "note": "[b]"},
}
LISTED = [
    {"status": 400, "cause": "invalid", "error": "prompt [is] too long", "miss": None},
    {"miss": "hit", "differs_at": None, "normalised": ["x"]},
    {"queued_s": 3.21, "differs_at": None, "tenant": None, "model": None},
    {"queued_s": 0.04, "cause": "overloaded", "error": "all are busy"},
    {"predicted_tokens": 2416, "is_firm": False, "differs_at": None},
    {"prefilled_by": "p", "transfer": "moved", "differs_at": None},
    {"prefilled_by": "p", "transfer": "late", "differs_at": None},
]

# --- engines, keys and what they did

USE = {
    "day": "2027-01-31", "tenant": None, "model": "m[x]", "requests": 3, "failed": 1,
    "prompt_tokens": 1234567, "cached_tokens": 1000000, "output_tokens": 99,
}  # fmt: skip
REMOVED = {"removed": "2027-01-31T09:05:07Z", "engine": "http://gpu1", "named": True, "undo": "kvpin add"}
KEY = {
    "id": "key-1", "name": "", "tenant": "acme", "ending": "wxyz", "models": None, "expired": False,
    "created": "2026-11-27T10:00:00Z", "expires": None,
}  # fmt: skip
KEYS = [
    KEY,
    KEY | {"id": "key-2", "models": ["m", "[fast]"], "expires": "2027-01-31T00:00:00Z"},
    KEY | {"id": "key-3", "expires": "2020-01-31T00:00:00Z", "expired": True},
]
SLOT = {"id": 0, "tokens": 812, "unknown": 3, "saved": 700, "operation": "save", "pinned_s": 0.0}
HOST = {"entries": 5, "bytes": 3 << 20, "cap": 64 << 20, "place": "/mem/[kv]", "in_memory": True}
LLAMA = {
    "id": "llama-0", "state": "ready", "trust": "precise", "why": "w", "in_flight": 0, "served": 1,
    "failed": 2, "audit": {
        "exact": 1, "checked": 1, "cached_tokens": 119_008, "unchecked": {"ended early": 2, "reuse off": 40}
    },
    "blocks": {"gpu": 50, "host": 43, "disk": 0}, "findings": ["-kvu is on [x]"],
    "kv": {
        "slots": [SLOT, SLOT | {"id": 1, "operation": None, "pinned_s": 59.6}],
        "files": {"tiers": {"host": HOST}},
    },
}  # fmt: skip
POOL = {
    "model": "m", "index_entries": 1, "tokens_per_block": 16, "engines": [LLAMA],
    "tokenisation": {"detail": "tokenised [here]", "forms": {"plain": {"source": "local"}}},
}  # fmt: skip
STATS = {
    "pools": [POOL], "unconnected": [], "pins": [], "reuse": True, "exchange": None,
    "totals": {"ready": 1, "elsewhere": 0, "engines": 1, "in_flight": 0, "served": 1, "failed": 2},
}  # fmt: skip
EXAMINED = {
    "kind": "vllm", "version": "", "detected": False, "role": "both", "model": "m", "models": {}, "loras": [],
    "max_model_len": None, "tokens_per_block": None, "gpu_blocks": 5, "host_blocks": None, "running": 0,
    "waiting": 0, "can": [], "cannot": {"pin": "restart it", "offload": "add LMCache"},
    "view": {"detail": "[none]"}, "tokenisation": {"detail": "here", "forms": {}}, "findings": [],
    "unseen": None,
}  # fmt: skip
PROBE = {"error": None, "reported": 48, "n_tokens": 49, "predicted": 48}

# --- tables and the screen of `kvpin top`


def show_table(width):
    table = TerminalTable(("request", "engine", "status", "tokens", "took"), less=("tokens", "took"))
    table.add("req-0123456789abcdef0123456789abcdef", "tensorrt_llm-12", "200", "4000", "1500.0 ms")
    table.print(Console(highlight=False, width=width))


def show_commands_to_the_terminal():
    table = TerminalTable(("model",), title="\x1b[2Jm")
    table.add("\x1b]0;title\x07x\x9b2J\nsecond line")
    table.print(Console(highlight=False, width=40))


def show_replays(width):
    figures = {"seed": 0, "policy": "kvpin", "gpu_tokens": 500} | {key: 1.5 for key, _, _ in COLUMNS}
    table_of([figures | {"engines": n} for n in (1, 2)]).print(Console(width=width, highlight=False))


COUNTS = ("prompt_tokens", "available_tokens", "selected_tokens", "delivered_tokens", "saved_s")


def engine(name, **fields):
    return {
        "id": name, "model": "m", "state": "ready", "trust": "precise", "queue_s": 0.25, "in_flight": 3,
        "held_tokens": {"gpu": 800, "host": 16}, "capacity_tokens": {"gpu": 1600},
        "reuse": dict.fromkeys(COUNTS, 0), "last_error": None, **fields,
    }  # fmt: skip


def snapshot(at, engines, requests=0, **reuse):
    return {
        "at": at, "reuse_on": True, "requests": requests, "waiting": {"m": 2},
        "reuse": {**dict.fromkeys(COUNTS, 0), **reuse}, "engines": engines,
    }  # fmt: skip


def request(name, **fields):
    return {
        "request_id": name, "started": 0.0, "engine": "e0", "status": None, "n_tokens": 50,
        "available_tokens": 48, "predicted_tokens": 32, "is_firm": True, "reported_tokens": None,
        "first_byte_s": None, "why": "the only one", **fields,
    }  # fmt: skip


def show_top(*events, width=160, height=None):
    view, console = TopView("http://k"), Console(width=width, height=height or 40, highlight=False)
    for name, event in events:
        view.take(name, event)
    console.print(view, height=height)


def over_seconds():
    """The snapshots of 20 s."""
    for at in range(21):
        reuse = {"prompt_tokens": 100 * at, "available_tokens": 80 * at, "delivered_tokens": 60 * at}
        engines = [engine("e0"), engine("e1", state="down")]
        yield "snapshot", snapshot(at, engines, 5 * at, **reuse)


ENDED = request("a", status=200, reported_tokens=32, first_byte_s=0.012, why=None)
SEEN = [
    ("snapshot", snapshot(0, [engine("e0")])),
    ("placed", request("a")),
    ("placed", request("b", why="another")),
    ("finished", ENDED),
]
MANY = snapshot(0, [engine(f"engine-{n}") for n in range(256)])
SHOWN = {
    **{f"a route: {title}": partial(show_route, ROUTE | fields) for title, fields in ROUTES.items()},
    **{f"a request: {title}": partial(show_request, REQUEST | fields) for title, fields in REQUESTS.items()},
    "requests": partial(show_requests, [REQUEST, *(REQUEST | fields for fields in LISTED)]),
    "the use of tenants": partial(show_usage, {"usage": [USE, USE | {"tenant": "acme", "model": None}]}),
    "removed": partial(show_engines, {"engines": [], "removed": [REMOVED, REMOVED | {"named": False}]}),
    "slots, files and findings": partial(show_stats, STATS),
    "keys, and no secret": partial(show_keys, {"keys": KEYS, "needed": True, "in_settings": 0}),
    "an engine examined": partial(show_examination, EXAMINED | {"probe": PROBE}),
    "a probe that failed": partial(show_examination, EXAMINED | {"probe": PROBE | {"error": "refused"}}),
    "a table where there is room": partial(show_table, 100),
    "an id is whole on any terminal": partial(show_table, 20),
    "a name is no command to the terminal": show_commands_to_the_terminal,
    "all of a replay": partial(show_replays, 140),
    "a replay on a narrow terminal": partial(show_replays, 88),
    "top: rates are those of the last seconds": lambda: show_top(*over_seconds()),
    "top: kvpin was restarted": lambda: show_top(*over_seconds(), ("snapshot", snapshot(22, []))),
    "top: a request keeps its reason and its place": lambda: show_top(*SEEN),
    "top: not firm": lambda: show_top(*SEEN, ("finished", ENDED | {"is_firm": False})),
    "top: a small terminal": lambda: show_top(
        ("snapshot", MANY), *(("placed", request(str(n))) for n in range(500)), width=60, height=24
    ),
}  # fmt: skip


def test_each_is_shown_as_it_was(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TZ", "UTC")
    said = {}
    for title, show in SHOWN.items():
        show()
        said[title] = "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.splitlines())
    check_golden(Path(__file__).with_name("shown.txt"), said)


def test_no_term_of_a_cost_is_forgotten_where_costs_are_shown():
    static = Path(api.__file__).parent / "static"
    script, style = (static / "why.js").read_text(), (static / "style.css").read_text()
    for term in TERMS:
        assert term in decisions._TERMS
        assert f'["{term}", ' in script
        assert f".{term} {{" in style
        assert term in {*reasons._PRICES, *reasons._OBSTACLES, "transfer_s"}, "a sentence names the transfer"
        assert Cost("a", **{term: 1.0}).first_token_s or f"`{term}`" in CostAnswer.__doc__
