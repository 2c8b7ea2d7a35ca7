"""What the command line of the benchmarks refuses, and the files a run leaves."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.engines import ENGINES, choose_engines
from benchmarks.errors import BenchmarkError

REPOSITORY = Path(__file__).resolve().parents[2]


def benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=200
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engines", "zero2,zer03"], "unknown engine 'zer03'"),
        (["--engines", "ddp_bf16"], "ddp_bf16 runs in bf16 only, not in fp32"),
        (["--rounds", "0"], "0 is too small; it must be at least 1"),
        (["--bucket-mb", "-1"], "-1 must be above 0"),
        (["--link", "1tbit"], "invalid choice: '1tbit'"),
    ],
)
def test_a_bad_option_is_refused_before_any_rank_starts(arguments: list[str], words: str) -> None:
    process = benchmark(*arguments)
    assert process.returncode == 2
    assert words in process.stderr
    assert "Traceback" not in process.stderr


def test_a_package_that_is_not_installed_is_named_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "deepspeed2", replace(ENGINES["deepspeed2"], package="a_package_nobody_has"))
    with pytest.raises(BenchmarkError) as error:
        choose_engines("zero2,deepspeed2", "fp32")
    assert str(error.value) == (
        "engine deepspeed2 needs the package a_package_nobody_has, which is not installed: "
        "pip install -e '.[bench]', or name the engines to run with --engines"
    )


def test_all_engines_are_those_that_the_precision_allows() -> None:
    without_deepspeed = [name for name, spec in ENGINES.items() if spec.package is None]
    assert choose_engines(",".join(without_deepspeed), "bf16") == without_deepspeed
    assert {"ddp_bf16", "alone_bf16"} == {name for name, spec in ENGINES.items() if "fp32" not in spec.precisions}


def test_a_run_leaves_its_numbers_and_its_table(tmp_path: Path) -> None:
    arguments = ["--size", "tiny", "--engines", "alone,zero2", "--rounds", "1", "--warmup", "1", "--steps", "2"]
    process = benchmark(*arguments, "--out", str(tmp_path))
    assert process.returncode == 0, process.stderr
    measured = json.loads((tmp_path / "results.json").read_text())["measurements"]
    assert [each["engine"] for each in measured] == ["alone", "zero2"]
    assert (tmp_path / "report.md").read_text() in process.stdout


def test_a_rank_that_fails_is_quoted(tmp_path: Path) -> None:
    process = benchmark(
        "--size", "tiny", "--engines", "zero2", "--device", "cuda", "--ranks", "1", "--out", str(tmp_path)
    )
    assert process.returncode == 2
    assert "zero2: rank" in process.stderr
    assert "ConfigError" in process.stderr
