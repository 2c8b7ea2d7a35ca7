import subprocess
import sys

import pytest
import torch

from zerotrain.device.device import Device, mapped_bytes
from zerotrain.device.kinds import Cuda, device_of, seed_torch
from zerotrain.offload.tier import PAGE_NBYTES


@pytest.mark.parametrize(
    ("name", "kind", "backend"), [("cpu", Device, "gloo"), ("cuda", Cuda, "nccl"), ("cuda:1", Cuda, "nccl")]
)
def test_a_device_is_asked_by_its_kind_and_no_gpu_is_needed_to_know_it(name: str, kind: type, backend: str) -> None:
    device = device_of(torch.device(name))
    assert (type(device), device.backend, device.device) == (kind, backend, torch.device(name))
    assert device_of(torch.device(name)) is device


def test_torch_draws_what_it_draws_after_its_own_way_to_seed():
    number = 2**64 - 3
    torch.manual_seed(number)
    wanted = torch.rand(4)
    seed_torch(number)
    assert torch.equal(torch.rand(4), wanted)
    assert torch.initial_seed() == number


CPU = device_of(torch.device("cpu"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_of_a_cpu_process_is_that_of_its_resident_memory_without_libraries() -> None:
    block = torch.ones(2**24)  # 64 MiB, touched
    assert CPU.peak_nbytes() > block.nbytes
    # A chosen stage was changed after three steps though all ranks fitted: each counted torch's libraries (2026-11-26).
    torch.svd(torch.ones(64, 64))  # some of its libraries, also in a process that was forked
    assert of_status("RssFile") > 2**22
    assert abs(CPU.peak_nbytes() - of_status("VmHWM") + of_status("RssFile")) < 2**21


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system counts otherwise")
def test_the_peak_of_a_process_is_not_that_of_the_one_which_started_it() -> None:
    """One that a process of 1.3 GB had started began with a peak of 1.3 GB (2026-11-27)."""
    block = torch.ones(2**28)  # 1 GiB, touched
    code = "from zerotrain.device.memory import most_nbytes; print(most_nbytes())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(told) < block.nbytes


def of_status(name: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))


@pytest.mark.parametrize("make", [CPU.host_bytes, CPU.bytes_for, mapped_bytes])
def test_host_memory_begins_on_a_page_as_a_disk_needs_it(make) -> None:
    memory = make(PAGE_NBYTES + 1)
    assert (memory.shape, memory.dtype, memory.device) == ((PAGE_NBYTES + 1,), torch.uint8, torch.device("cpu"))
    assert memory.data_ptr() % PAGE_NBYTES == 0
    memory.fill_(7)


def test_random_numbers_drawn_inside_change_none_behind() -> None:
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    with CPU.keep_generators():
        torch.rand(5)
    assert torch.equal(torch.rand(3), wanted)
    assert CPU.generator is torch.default_generator


# What cuBLAS keeps of a GPU's memory, by the settings that torch reads; no GPU is asked.


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
