"""What a run sets for torch's kernels; what they compute then, tests/distributed/test_gpu.py looks at."""

from collections.abc import Iterator

import pytest
import torch

from zerotrain.training.sameness import choose_kernels

PLACES = (
    (torch.backends.cuda.matmul, "allow_tf32"),
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cudnn, "benchmark"),
)


@pytest.fixture(autouse=True)
def settings_of_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those that torch has, again behind the test."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = [getattr(of, name) for of, name in PLACES]
    for of, name in PLACES:
        setattr(of, name, False)
    yield
    for (of, name), value in zip(PLACES, before, strict=True):
        setattr(of, name, value)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("tf32", [False, True])
def test_matrices_are_multiplied_in_tf32_where_a_run_says_so(tf32: bool) -> None:
    choose_kernels(deterministic=False, tf32=tf32)
    assert torch.backends.cuda.matmul.allow_tf32 is tf32
    assert torch.backends.cudnn.allow_tf32 is tf32
    assert not torch.are_deterministic_algorithms_enabled()


def test_where_kernels_are_deterministic_there_is_no_tf32() -> None:
    choose_kernels(deterministic=True, tf32=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32
