import functools
from collections.abc import Callable

import pytest
from commands import Command, by_hand, by_torchrun

from tests.zygote.client import Zygote


@pytest.fixture(scope="session")
def launch(zygote: Zygote) -> Callable[..., Command]:
    """`by_hand`, where a test is not about the start."""
    return functools.partial(by_hand, zygote=zygote)


@pytest.fixture(scope="session")
def torchrun(zygote: Zygote) -> Callable[..., Command]:
    """`by_torchrun`, where a test is not about the start."""
    return functools.partial(by_torchrun, zygote=zygote)
