"""What cuBLAS keeps of a GPU's memory, by the settings that torch reads; no GPU is asked."""

import pytest
import torch

from zerotrain.device.kinds import device_of

MIB = 2**20


@pytest.mark.parametrize(
    ("given", "capability", "nbytes"),
    [
        (None, (9, 0), 64 * MIB),
        (None, (8, 0), 2 * (8 * MIB + 128 * 1024)),
        (":4096:8", (8, 0), 64 * MIB),
        (":4096:2:16:8", (9, 0), 2 * (8 * MIB + 128 * 1024)),
        (":0:0", (9, 0), 0),
    ],
)
def test_the_workspaces_of_cublas_are_those_of_two_threads(
    given: str | None, capability: tuple[int, int], nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if given is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    else:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given)
    assert device_of(torch.device("cuda", 0)).kernels_nbytes == nbytes


def test_a_cpu_keeps_nothing() -> None:
    assert device_of(torch.device("cpu")).kernels_nbytes == 0
