"""Where the ranks of this machine run."""

import pytest

from zerotrain.launching.task import device_for


@pytest.mark.parametrize(
    ("wanted", "num_ranks", "num_gpus", "device"),
    [
        ("auto", 2, 0, "auto"),
        ("auto", 1, 1, "auto"),
        ("auto", 2, 2, "auto"),
        ("auto", 2, 1, "cpu"),
        ("auto", 8, 4, "cpu"),
        ("cuda", 2, 1, "cuda"),
        ("cpu", 2, 1, "cpu"),
    ],
)
def test_ranks_run_on_gpus_where_each_has_one_and_a_line_says_where_not(wanted, num_ranks, num_gpus, device):
    chosen, why = device_for(wanted, num_ranks, num_gpus)
    assert chosen == device
    assert (why is None) == (device == wanted)


def test_the_line_names_both_numbers_and_what_uses_the_gpu():
    _, why = device_for("auto", 2, 1)
    assert why == (
        "launch.device=auto: 2 ranks need a GPU each and this machine has 1 GPU, so they run on the CPU; "
        "launch.nproc_per_node=1 uses the GPU"
    )
