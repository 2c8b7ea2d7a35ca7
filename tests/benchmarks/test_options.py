"""What the command line of the benchmarks refuses, and the files a run leaves."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.engines import ENGINES, choose_engines
from benchmarks.errors import BenchmarkError
from benchmarks.network import SHARED
from benchmarks.rounds import measure
from benchmarks.workload import Workload


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rounds", "0"], "0 is too small; it must be at least 1"),
        (["--bucket-mb", "-1"], "-1 must be above 0"),
        (["--link", "1tbit"], "invalid choice: '1tbit'"),
    ],
)
def test_an_option_out_of_range_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engines", "zero2,zer03"], "unknown engine 'zer03'; allowed: all, alone"),
        (["--engines", "ddp_bf16"], "ddp_bf16 runs in bf16 only, not in fp32"),
        (["--engines", "deepspeed3", "--compile"], "deepspeed3 does not work with --compile"),
        (["--device", "cuda", "--ranks", str(torch.cuda.device_count() + 1)], "GPU"),
    ],
)
def test_what_cannot_run_here_is_refused_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert words in line


def test_a_package_that_is_not_installed_is_named_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "deepspeed2", replace(ENGINES["deepspeed2"], package="a_package_nobody_has"))
    with pytest.raises(BenchmarkError) as error:
        choose_engines("zero2,deepspeed2", "fp32")
    assert str(error.value) == (
        "engine deepspeed2 needs the package a_package_nobody_has, which is not installed: "
        "pip install -e '.[bench]', or name the engines to run with --engines"
    )


def test_a_run_leaves_its_numbers_and_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--size", "tiny", "--engines", "alone,zero2", "--rounds", "1", "--warmup", "1", "--steps", "2"]
    code = main([*options, "--out", str(tmp_path)])
    output = capsys.readouterr()
    assert code == 0, output.err
    measured = json.loads((tmp_path / "results.json").read_text())["measurements"]
    assert [each["engine"] for each in measured] == ["alone", "zero2"]
    assert (tmp_path / "report.md").read_text() in output.out


def test_a_rank_that_fails_is_quoted() -> None:
    with pytest.raises(BenchmarkError, match=r"(?s)zero2: rank 0 ended with exit code 1:.*precision.name: got fp8"):
        measure("zero2", Workload(size="tiny", precision="fp8", num_ranks=1), SHARED)
