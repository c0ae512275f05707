"""A process that trains for many tests."""

from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.support.processes import fork_server


@pytest.fixture(scope="module")
def processes():
    with ProcessPoolExecutor(1, mp_context=fork_server()) as pool:
        yield pool
