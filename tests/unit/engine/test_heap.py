import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is not glibc's")

FAULTS = """
import ctypes, resource, sys, torch, zerotrain

def build(**offload):
    offloads = zerotrain.OffloadConfig(**offload)
    return zerotrain.build_engine(torch.nn.Linear(2, 2), optimizer=torch.optim.AdamW, offload=offloads)

def num_faults(**offload):
    for threshold in (-3, -1):  # where glibc begins; from there it goes up by itself, by chance sooner or later
        ctypes.CDLL(None).mallopt(threshold, 2**17)
    engine = build(**offload)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for step in range(4):
        kept = [torch.zeros(3 * 2**20) for _ in range(4)]  # 48 MiB
        del kept
        if step == 1:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(num_faults(), num_faults(optimizer="disk", path=sys.argv[1]))
"""


def num_faults(folder: str, **variables: str) -> list[int]:
    """With an engine, and with one that offloads to a disk."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", FAULTS, folder]
    told = subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=True)
    return [int(number) for number in told.stdout.split()]


def test_what_was_freed_is_used_again_without_page_faults_but_with_a_disk_memory_is_given_back(tmp_path):
    with_engine, with_disk = num_faults(str(tmp_path))
    assert with_engine < 1000
    assert with_disk > 10_000


def test_what_the_user_has_set_stays(tmp_path):
    assert min(num_faults(str(tmp_path), MALLOC_MMAP_THRESHOLD_="131072")) > 10_000
