import functools
from collections.abc import Callable

import pytest
from commands import Command, by_hand

from tests.zygote.client import Zygote


@pytest.fixture(scope="session")
def launch(zygote: Zygote) -> Callable[..., Command]:
    """`by_hand`, where a test is not about the start."""
    return functools.partial(by_hand, zygote=zygote)
