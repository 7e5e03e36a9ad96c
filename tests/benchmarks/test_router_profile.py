"""Profiles: samples are summed by package and scaled to the CPU of a request."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_samples_count_for_the_innermost_frame(script):
    serve = f"serve ({ROOT}/proxy/flow.py:10)"
    python = "/usr/lib/python3.11"
    folded = "\n".join(
        [
            f"{serve};place ({ROOT}/proxy/core/placement/scores.py:5) 3",
            f"{serve};match ({ROOT}/proxy/core/placement/rates.py:7) 1",
            f"{serve} 2",
            f"{serve};send ({ROOT}/.venv/lib/python3.11/site-packages/aiohttp/client.py:1) 4",
            f"run ({python}/asyncio/runners.py:118) 5",
            f"{serve};loads ({python}/json/decoder.py:3) 6",
            f"{serve};__init__ (<string>:3) 7",
            f"run ({python}/threading.py:1);_worker ({python}/concurrent/futures/thread.py:81) 100",
        ]
    )
    assert script.by_package(folded) == {
        "proxy/core/placement": 4,
        "proxy/flow": 2,
        "aiohttp": 4,
        "event loop": 5,
        "json/decoder": 6,
        "generated code": 7,
    }
