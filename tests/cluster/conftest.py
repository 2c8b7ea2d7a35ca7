from collections.abc import Iterator

import pytest

from benchmarks.errors import BenchmarkError
from tests.cluster.hosts import Hosts, joined_hosts

NUM_HOSTS = 3


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Three hosts on this machine; tests that need two leave the last one alone."""
    try:
        with joined_hosts(NUM_HOSTS, tmp_path_factory.mktemp("hosts")) as hosts:
            yield hosts
    except BenchmarkError as error:
        pytest.skip(str(error))
