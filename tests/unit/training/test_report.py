import io
import re

import torch
from msgspec.structs import replace
from rich.console import Console

from zerotrain.training import RunResult
from zerotrain.training.report import print_report, say

USAGE = {
    "parameters_nbytes": 248_879_616,
    "gradients_nbytes": 31_109_952,
    "optimizer_nbytes": 186_659_712,
    "offloaded_nbytes": 0,
    "sent_nbytes": 435_539_329,
    "theory_parameters_nbytes": 248_879_616,
    "theory_gradients_nbytes": 31_109_952,
    "theory_optimizer_nbytes": 186_659_712,
    "theory_offloaded_nbytes": 0,
    "theory_sent_nbytes": 435_539_328,
    "peak_nbytes": 12_345_678_901,
    "reserved_nbytes": 0,
}
RESULT = RunResult(world_size=8, steps=200, final_train_loss=2.3, final_val_loss=2.2185, tokens_per_s=10799.5)


def printed(usages: list[dict[str, int]], result: RunResult = RESULT, device: str = "cuda") -> list[str]:
    file = io.StringIO()
    print_report(Console(file=file, width=80), result=result, usages=usages, device=torch.device(device))
    return file.getvalue().splitlines()


def test_each_rank_has_a_line_with_every_measured_value_beside_its_theory():
    lines = printed([USAGE, USAGE | {"gradients_nbytes": 31_209_952}])
    first, second = (re.sub(r" +", " ", line).strip() for line in lines[-4:-2])
    assert first == "0 248.9 / 248.9 31.11 / 31.11 186.7 / 186.7 435.5 / 435.5 12.35"
    assert second == "1 248.9 / 248.9 31.21 / 31.11 186.7 / 186.7 435.5 / 435.5 12.35"


def test_what_torch_has_reserved_of_a_gpu_is_told_of_the_rank_with_most():
    lines = printed([USAGE, USAGE | {"reserved_nbytes": 15_000_000_000}, USAGE])
    assert "peak of tensors on the GPU, for which torch reserved 15 GB" in " ".join(" ".join(lines).split())
    assert "reserved" not in "".join(printed([USAGE]))


def test_where_the_stage_has_changed_each_has_its_rows_and_80_columns_are_enough():
    shards = USAGE | {"parameters_nbytes": 31_109_952, "theory_parameters_nbytes": 31_109_952}
    stages = [
        {"stage": 3, "from_step": 0, "ranks": [shards, shards]},
        {"stage": 1, "from_step": 20, "ranks": None},  # its run was stopped
        {"stage": 2, "from_step": 150, "ranks": None},
    ]
    lines = [" ".join(line.split()) for line in printed([USAGE, USAGE], replace(RESULT, stages=stages))]
    rest = "31.11 / 31.11 186.7 / 186.7 435.5 / 435.5 12.35"
    rows = [line for line in lines if line.count("/") == 4]
    assert rows == [f"3, {rank} 31.11 / 31.11 {rest}" for rank in range(2)] + [
        f"2, {rank} 248.9 / 248.9 {rest}" for rank in range(2)
    ]
    assert "stage 3 from step 0, 2 from step 150" in lines


def test_the_summary_tells_labels_where_they_are_not_the_tokens_and_samples_of_what_is_no_text():
    def summary(**speeds: float | None) -> str:
        return " ".join(" ".join(printed([USAGE], replace(RESULT, **speeds))).split())

    assert "10,800 tokens/s parameters" in summary(labels_per_s=10799.6, samples_per_s=84.0)
    assert "10,800 tokens/s, 2,700 labels/s" in summary(labels_per_s=2700.0, samples_per_s=84.0)
    no_text = summary(tokens_per_s=None, labels_per_s=84.0, samples_per_s=84.0)
    assert "validation loss 2.2185, 84 samples/s" in no_text
    assert "tokens/s" not in no_text


def test_one_rank_that_sends_nothing_can_be_shown():
    alone = USAGE | {"sent_nbytes": 0, "theory_sent_nbytes": 0}
    assert "0 / 0" in printed([alone], RunResult(world_size=1), device="cpu")[-3]


def test_in_a_terminal_lines_break_between_words_and_a_path_stays_whole():
    line = (
        "warning: /a/path/"
        + "x" * 90
        + "/of-a-file cannot be written to: No space left on device, and training goes on"
    )
    file = io.StringIO()
    say(Console(file=file, width=80, force_terminal=True, color_system=None), line)
    shown = file.getvalue().splitlines()
    assert " ".join(shown) == line
    assert len(shown) == 3
    assert [len(each) > 80 for each in shown] == [False, True, False]


def test_outside_a_terminal_a_line_stays_whole():
    file = io.StringIO()
    say(Console(file=file, width=20), "one two three four five six")
    assert file.getvalue() == "one two three four five six\n"


def test_no_word_of_the_table_is_broken_at_80_columns_with_every_column():
    usage = USAGE | {"offloaded_nbytes": 123_456_789, "theory_offloaded_nbytes": 123_456_789}
    stages = [{"stage": 3, "from_step": 0, "ranks": [usage]}, {"stage": 2, "from_step": 150, "ranks": None}]
    lines = printed([usage], replace(RESULT, stages=stages))
    assert max(map(len, lines)) <= 80
    found = set(" ".join(lines).split())
    assert {"parameters", "gradients", "optimizer", "offloaded", "sent/step", "peak"} <= found
    assert {"248.9", "31.11", "186.7", "123.5", "435.5", "12.35", "tokens/s"} <= found
    assert "…" not in "".join(lines)
