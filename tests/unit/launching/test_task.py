"""Where the ranks of this machine run, and what the end of a run says."""

from pathlib import Path

import pytest

from zerotrain.launching.task import device_for, print_ending


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


def test_the_end_says_where_things_are_and_what_may_come_next_at_80_columns(tmp_path: Path, capsys):
    run_dir = tmp_path / "outputs/2026-11-21/23-04-45-123456"
    print_ending(run_dir, tmp_path)
    saved, *following = capsys.readouterr().out.splitlines()
    assert saved == "saved in outputs/2026-11-21/23-04-45-123456: result.json, metrics.jsonl, ranks/"
    assert len(following) == 2
    assert max(map(len, [saved, *following])) <= 80
