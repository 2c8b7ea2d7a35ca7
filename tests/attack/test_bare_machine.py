"""Benchmarks and GPU tests on a machine with torch, pytest and little else: no Hydra, no peers, no plugins."""

import json
import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.ranks.processes import HANG_S

REPOSITORY = Path(__file__).resolve().parents[2]
ABSENT = ("hydra", "omegaconf", "antlr4", "deepspeed", "matplotlib", "transformers", "peft", "xdist", "pytest_timeout")
HIDE = (
    f"import sys\nsys.modules.update(dict.fromkeys({ABSENT!r}))  # to import one of these fails, as if it were absent\n"
)


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds none of these packages, nor what may come beside them."""
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    return os.environ | {
        "PYTHONPATH": str(tmp_path),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def run(words: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Exit code, and all that was printed."""
    done = subprocess.run(
        words,
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_S,
    )
    return done.returncode, done.stdout


def make(target: str, environment: dict[str, str], **variables: str) -> tuple[int, str]:
    # Without what the make that may run these tests hands down.
    words = [f"{name}={value}" for name, value in (variables | {"PYTHON": sys.executable}).items()]
    return run(["env", "-u", "MAKEFLAGS", "-u", "MAKELEVEL", "make", target, *words], environment)


@pytest.mark.parametrize("module", ["benchmarks", "benchmarks.fake_world", "benchmarks.gpu"])
def test_the_help_of_a_benchmark_needs_no_other_package(module: str, bare: dict[str, str]) -> None:
    code, printed = run([sys.executable, "-m", module, "--help"], bare)
    assert code == 0, printed
    assert f"usage: python -m {module} " in printed


def test_what_is_absent_is_left_out_with_a_line_and_the_rest_is_measured(bare: dict[str, str], tmp_path: Path) -> None:
    command = "-m benchmarks --size tiny --ranks 1 --rounds 1 --steps 2 --engines deepspeed0,alone --out"
    code, printed = run([sys.executable, *command.split(), str(tmp_path / "out")], bare)
    assert code == 0, printed
    assert "deepspeed0 left out: needs the package deepspeed, which is not installed" in printed
    assert "without chart.png: matplotlib is not installed" in printed
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [each["engine"] for each in results["measurements"]] == ["alone"]
    assert results["left_out"].keys() == {"deepspeed0"}


def test_each_part_of_bench_gpu_leaves_its_figures_in_the_folder_that_was_named(
    bare: dict[str, str], tmp_path: Path
) -> None:
    """Without compiling in the compiled part, which takes minutes on a CPU."""
    out = tmp_path / "out"
    variables = {"DEVICE": "cpu", "SIZES": "tiny", "ENGINES": "alone,deepspeed3", "TIME_LIMIT": "3000"}
    variables["OPTIONS"] = "--rounds 1 --steps 2 --engines-among-fake zero3,fsdp2"
    code, printed = make("bench-gpu", bare | {"TORCHDYNAMO_DISABLE": "1"}, OUT=str(out), **variables)
    assert code == 0, printed
    assert (out / "tiny-eager" / "report.md").is_file()
    assert (out / "tiny-compiled" / "report.md").is_file()
    assert "FSDP2, resharded" in (out / "tiny-fake-ranks.md").read_text()


def test_the_tests_for_a_gpu_skip_and_nothing_fails(bare: dict[str, str]) -> None:
    code, printed = make("test-gpu", bare)
    assert code == 0, printed
    assert "needs a CUDA GPU" in printed
    code, printed = run([sys.executable, "-m", "pytest", "-m", "not gpu", "-rs", "tests/distributed/test_gpu.py"], bare)
    assert code == 0, printed


def test_wheels_that_came_along_are_imported_before_what_is_there(bare: dict[str, str], tmp_path: Path) -> None:
    with ZipFile(tmp_path / "some_package-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("pytest.py", "print('the pytest of the wheel')\n")
    code, printed = make("test-gpu", bare, WHEELS=str(tmp_path), CARRIED=str(tmp_path / "carried"))
    assert code == 0, printed
    assert "the pytest of the wheel" in printed
