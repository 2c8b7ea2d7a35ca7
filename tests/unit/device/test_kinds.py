import pytest
import torch

from zerotrain.device.device import lies_on_host
from zerotrain.device.kinds import Cpu, Cuda, device_of, num_gpus, seed_torch


@pytest.mark.parametrize(
    ("name", "kind", "backend"), [("cpu", Cpu, "gloo"), ("cuda", Cuda, "nccl"), ("cuda:1", Cuda, "nccl")]
)
def test_a_device_is_asked_by_its_kind_and_no_gpu_is_needed_to_know_it(name: str, kind: type, backend: str) -> None:
    device = device_of(torch.device(name))
    assert (type(device), device.backend, device.device) == (kind, backend, torch.device(name))
    assert device_of(torch.device(name)) is device


def test_there_are_as_many_gpus_as_torch_can_use() -> None:
    assert num_gpus() == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


def test_only_values_in_the_memory_of_the_host_lie_there() -> None:
    assert lies_on_host(torch.zeros(2))
    assert not lies_on_host(torch.zeros(2, device="meta"))


def test_torch_draws_what_it_draws_after_its_own_way_to_seed():
    number = 2**64 - 3
    torch.manual_seed(number)
    wanted = torch.rand(4)
    seed_torch(number)
    assert torch.equal(torch.rand(4), wanted)
    assert torch.initial_seed() == number
