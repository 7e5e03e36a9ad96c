from __future__ import annotations

import sys

import pytest

from engine_adapter.memory import available_bytes

MIB = 1 << 20


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:       2048 kB\nMemFree:  100 kB\nMemAvailable:   1024 kB\n"}
UNIFIED = {"proc/self/cgroup": "0::/system.slice/kvpin.service\n"}
SERVICE = "sys/fs/cgroup/system.slice/kvpin.service"


def limits(group, most, used, cache=0):
    return {
        f"{group}/memory.max": f"{most}\n",
        f"{group}/memory.current": f"{used}\n",
        f"{group}/memory.stat": f"anon 7\ninactive_file {cache}\n",
    }


def v1(group, most, used):
    return {f"{group}/memory.limit_in_bytes": f"{most}\n", f"{group}/memory.usage_in_bytes": f"{used}\n"}


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, None),
        (MEMINFO, MIB),
        (MEMINFO | UNIFIED, MIB),
        (MEMINFO | UNIFIED | limits(SERVICE, "max", 5), MIB),
        (MEMINFO | UNIFIED | limits(SERVICE, 5000, 4000), 1000),
        (MEMINFO | UNIFIED | limits(SERVICE, 5000, 4000, cache=3000), 4000),
        (MEMINFO | UNIFIED | limits(SERVICE, 4000, 5000), 0),
        (MEMINFO | UNIFIED | limits("sys/fs/cgroup/system.slice", 900, 100), 800),
        (MEMINFO | UNIFIED | limits("sys/fs/cgroup", 900, 300), 600),
        (MEMINFO | UNIFIED | limits(SERVICE, 10 * MIB, 4000), MIB),
        (
            MEMINFO | {"proc/self/cgroup": "4:memory:/a\n3:cpu:/b\n"} | v1("sys/fs/cgroup/memory/a", 70, 20),
            50,
        ),
        (MEMINFO | {"proc/self/cgroup": "4:memory:/gone\n"} | v1("sys/fs/cgroup/memory", 70, 30), 40),
    ],
)
def test_the_smallest_of_all_limits_counts(files, available, tmp_path):
    assert available_bytes(write(tmp_path, files)) == available


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says it")
def test_this_machine_has_some():
    assert 0 < available_bytes() < 1 << 50
