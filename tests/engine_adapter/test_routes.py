"""The routes beside `/v1` that adapters declare."""

from engine_adapter import NATIVE_ROUTES

# What changes an engine for everybody, tells of everybody, or reaches beyond the engine.
OPERATORS = {
    "/metrics",
    "/slots/0",
    "/tools",
    "/cors-proxy",
    "/flush_cache",
    "/reset_prefix_cache",
    "/sleep",
    "/pause",
    "/server_info",
    "/load_lora_adapter",
    "/kv/flush",
    "/invocations",
    "/health",
}


def test_no_route_is_an_operators_or_below_v1():
    assert not OPERATORS & NATIVE_ROUTES.keys()
    assert not any(path.startswith(("/v1/", "/admin")) for path in NATIVE_ROUTES)
    assert all(route.method in ("GET", "POST") for route in NATIVE_ROUTES.values())
