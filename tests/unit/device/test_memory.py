import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zerotrain
from zerotrain.device.memory import own_nbytes
from zerotrain.engine.schedule import schedule

is_glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc 2.33 counts what it has mapped"
)

MAPPED = """
import ctypes
from zerotrain.device.memory import set_heap

class Malloc(ctypes.Structure):  # mallinfo2(3)
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usm fsm uord ford keep".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Malloc
libc.malloc.restype = ctypes.c_void_p
CALLS
before = libc.mallinfo2().hblks
libc.malloc(ctypes.c_size_t(NBYTES))
print(libc.mallinfo2().hblks - before)
"""


def num_mapped(calls: str, nbytes: int, **environment: str) -> int:
    """How many of one block of memory get pages of their own, which go back to the system once it is freed."""
    program = MAPPED.replace("CALLS", calls).replace("NBYTES", str(nbytes))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, env=inherited | environment, capture_output=True, text=True, check=True)
    return int(ran.stdout)


@is_glibc
@pytest.mark.parametrize(
    ("calls", "mib", "is_mapped"),
    [
        ("set_heap()", 12, 0),
        ("set_heap()", 20, 1),
        ("set_heap(returns=True)", 12, 1),
        ("set_heap(returns=True)", 2, 0),
        ("set_heap(returns=True); set_heap()", 12, 0),
    ],
)
def test_a_large_block_is_mapped_where_freed_memory_is_to_go_back(calls: str, mib: int, is_mapped: int) -> None:
    assert num_mapped(calls, mib * 2**20) == is_mapped


@is_glibc
def test_what_the_user_has_set_stays() -> None:
    """glibc reads it when a process begins."""
    assert num_mapped("set_heap()", 2**20, MALLOC_MMAP_THRESHOLD_="131072") == 1


@pytest.mark.parametrize(("optimizer", "returns"), [("device", False), ("cpu", False), ("disk", True)])
def test_an_engine_sets_the_heap_once_when_it_is_built(
    optimizer: str, returns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(schedule, "set_heap", lambda *, returns: calls.append(returns))
    offload = zerotrain.OffloadConfig(optimizer=optimizer, path=str(tmp_path))
    zero = zerotrain.ZeroConfig(stage=1)
    engine = zerotrain.build_engine(torch.nn.Linear(2, 2), optimizer=torch.optim.AdamW, zero=zero, offload=offload)
    engine.backward(engine(torch.ones(2)).sum())
    engine.step()
    assert calls == [returns]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_memory_of_a_process_is_counted_without_files():
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    anonymous, shared, files = (1024 * int(status[f"Rss{kind}"].split()[0]) for kind in ("Anon", "Shmem", "File"))
    assert abs(own_nbytes() - anonymous - shared) < 2**21  # which the lines above may have taken
    assert files > 2**24
