"""One CPU thread, as each rank has: the bits of a matrix product depend on the number of threads. And no network."""

import os

import pytest
import torch

torch.set_num_threads(1)
os.environ["HF_HUB_OFFLINE"] = "1"  # read when its packages are imported; the ranks of a test inherit it


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
