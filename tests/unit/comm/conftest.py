from pathlib import Path

import pytest

from zerotrain.comm.environment import RankEnvironment


@pytest.fixture
def ranks(tmp_path: Path):
    """(rank, size) -> a rank that meets the others in a file."""

    def make(rank: int, size: int = 3) -> RankEnvironment:
        return RankEnvironment(rank, size, rank, size, "localhost", 1, str(tmp_path / "store"))

    return make
