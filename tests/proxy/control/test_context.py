async def test_each_control_plane_has_its_own_operations(world):
    from dataclasses import replace

    from proxy.control.operations import Operations

    other = replace(world.control, operations=Operations())
    assert other.operations is not world.control.operations
    assert other.fleet is world.control.fleet
    assert world.control.max_body_bytes > 0
