"""Whether a GPU's streams and events keep their order while it is late. `make test-gpu` runs these."""

import pickle
from pathlib import Path

import pytest
import torch

from zerotrain.device.kinds import device_of, seed_torch

pytestmark = pytest.mark.gpu

NBYTES = 2**20
LATE = 50_000_000
"""Of the clock of a GPU."""


def test_a_copy_waits_for_what_computes_and_what_computes_for_the_copy() -> None:
    device = device_of(torch.device("cuda", 0))
    there, back = device.stream(), device.stream()
    on_host, memory = device.host_bytes(NBYTES), device.bytes_for(NBYTES, there, back)
    assert on_host.is_pinned()
    memory.zero_()
    torch.cuda._sleep(LATE)
    memory.fill_(7)
    stored = back.copy(on_host, memory, events=[device.event()])
    stored.settle()
    assert on_host.unique().tolist() == [7]
    on_host.fill_(9)
    there.copy(memory, on_host).wait()
    assert memory.unique().tolist() == [9]


def test_a_stream_waits_for_an_event_and_an_event_is_recorded_in_it() -> None:
    device = device_of(torch.device("cuda", 0))
    stream, values = device.stream(), torch.zeros(NBYTES, device="cuda")
    torch.cuda._sleep(LATE)
    values.fill_(1)
    stream.wait(device.event())
    with stream.current():
        values.add_(1)
        done = device.event()
    done.wait()
    assert values.unique().tolist() == [2]


def test_a_seed_is_that_of_torch_on_the_gpu_too() -> None:
    number = 2**64 - 3
    torch.manual_seed(number)
    wanted = torch.rand(3), torch.rand(3, device="cuda")
    seed_torch(number)
    assert torch.equal(torch.rand(3), wanted[0])
    assert torch.equal(torch.rand(3, device="cuda"), wanted[1])


def test_random_numbers_drawn_inside_change_none_behind() -> None:
    device = device_of(torch.device("cuda", 0))
    torch.manual_seed(0)
    wanted = torch.rand(3, device="cuda")
    torch.manual_seed(0)
    with device.keep_generators():
        torch.rand(5, device="cuda")
    assert torch.equal(torch.rand(3, device="cuda"), wanted)
    assert device.generator is torch.cuda.default_generators[0]


def test_its_name_memory_and_peak_are_those_of_torch(tmp_path: Path) -> None:
    device = device_of(torch.device("cuda", 0))
    device.use()
    block = torch.ones(2**24, device="cuda")
    assert block.nbytes <= device.peak_nbytes() == torch.cuda.max_memory_allocated() < device.own_nbytes
    assert device.name == torch.cuda.get_device_name()
    history = device.memory_history()
    assert history is not None
    history.begin()
    del block
    history.write(tmp_path / "memory.pickle")
    assert pickle.loads((tmp_path / "memory.pickle").read_bytes())
