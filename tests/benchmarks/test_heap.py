import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = """
import ctypes, resource, torch
from benchmarks.heap import reuse_what_is_freed
for threshold in (-3, -1):  # where glibc begins; from there it goes up by itself, by chance sooner or later
    ctypes.CDLL(None).mallopt(threshold, 2**17)
{call}
for step in range(20):
    if step == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = [torch.zeros(3 * 2**20) for _ in range(4)]  # 48 MiB
    del kept
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def num_faults(call: str, **variables: str) -> int:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    code = FAULTS.format(call=call)
    told = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    return int(told.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is not glibc's")
def test_what_was_freed_is_used_again_without_page_faults():
    assert num_faults("") > 10_000
    assert num_faults("reuse_what_is_freed()") < 1000


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is not glibc's")
def test_what_the_user_has_set_stays():
    assert num_faults("reuse_what_is_freed()", MALLOC_MMAP_THRESHOLD_="131072") > 10_000
