"""`python -m zerotrain plan`: figure 1 of ZeRO (arXiv 1910.02054), for each optimizer."""

import pytest

from zerotrain.commands.plan import main
from zerotrain.sharding.plan import stages_of_size

KEPT = {"adam": 8, "adamw": 8, "sgd": 0, "momentum": 4, "adagrad": 4, "adafactor": 0, "muon": 4}
"""Bytes of fp32 state that an optimizer keeps of a parameter."""


def rows_of(out: str) -> list[list[float]]:
    """The numbers of each stage: parameters, gradients, optimizer, their sum and what is sent, in GB."""
    return [[float(cell) for cell in line.split()[1:]] for line in out.splitlines()[2:6]]


def test_the_figure_of_the_paper_is_printed(capsys: pytest.CaptureFixture[str]):
    assert main(["--parameters", "7.5e9", "--ranks", "64", "--optimizer", "adam"]) == 0

    assert [row[3] for row in rows_of(capsys.readouterr().out)] == [120, 31.4, 16.6, 1.88]


@pytest.mark.parametrize("optimizer", KEPT)
@pytest.mark.parametrize(("precision", "itemsize"), [("fp32", 4), ("bf16", 2)])
def test_each_optimizer_is_planned_by_the_formulas_of_the_paper(optimizer: str, precision: str, itemsize: int):
    numel, ranks = 64_000, 4
    weights, kept = numel * itemsize, numel * (KEPT[optimizer] + 4 * (itemsize == 2))
    part = 3 * weights // 4  # what one gather or one reduce-scatter sends

    assert stages_of_size(numel, ranks, optimizer, precision) == [
        {"parameters": weights, "gradients": weights, "optimizer": kept, "sent": 2 * part},
        {"parameters": weights, "gradients": weights, "optimizer": kept // 4, "sent": 2 * part},
        {"parameters": weights, "gradients": weights // 4, "optimizer": kept // 4, "sent": 2 * part},
        {"parameters": weights // 4, "gradients": weights // 4, "optimizer": kept // 4, "sent": 3 * part},
    ]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--parameters", "many"], "--parameters: got 'many'; it must be a number from 1 to 1e18"),
        (["--parameters", "0"], "--parameters: got '0'; it must be a number from 1 to 1e18"),
        (["--parameters", "7e9", "--ranks", "0"], "--ranks: got '0'; it must be a whole number from 1"),
        (["--parameters", "7e9", "--optimizer", "adm"], "adm"),
    ],
)
def test_what_is_wrong_is_told_in_the_last_line(given: list[str], named: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(given)

    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert out == ""
    assert named in err.splitlines()[-1]
