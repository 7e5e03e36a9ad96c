"""A llama-server is built before the tests that need one, and for no others."""

import tests.llama as helpers


def test_a_pure_test_needs_no_server(request, save_dir):
    assert not helpers._needs_llama(request.node)


def test_one_that_may_start_a_server_needs_it(request, start_llama):
    assert helpers._needs_llama(request.node)
