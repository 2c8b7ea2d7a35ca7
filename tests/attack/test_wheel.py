"""The wheel has a way in: README's commands for it run in an environment that has never seen the clone."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import pytest
from commands import REPOSITORY, TINY, result_of

from zerotrain import __version__

BUILT_FROM = ("constraints.txt", "setup.py", "pyproject.toml", "README.md", "LICENSE", "zerotrain", "conf")
SHIMS = {"pip": "pip", "torchrun": "torch.distributed.run"}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sources, and a virtual environment in `env` with this one's packages but zerotrain."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in BUILT_FROM:
        source = REPOSITORY / name
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, folder / name, ignore=ignored) if source.is_dir() else shutil.copy(
            source, folder / name
        )
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "env"], cwd=folder, check=True)
    # The packages of a folder that is named so are there, but not the clone that an editable install points to.
    [site] = (folder / "env/lib").glob("python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    for name, module in SHIMS.items():
        shim = folder / f"env/bin/{name}"
        shim.write_text(f'#!/bin/sh\nexec {folder}/env/bin/python -m {module} "$@"\n')
        shim.chmod(0o755)
    return folder


def run(command: str, environment: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    values = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    values |= {"PATH": f"{environment}/env/bin:{values['PATH']}", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=values, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_what_readme_says_of_the_wheel_runs_outside_the_clone_with_the_packaged_conf(environment: Path, tmp_path: Path):
    [block] = re.findall(r"^```sh\n(.*?)^```$", (REPOSITORY / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    build, install, *launches = block.splitlines()
    built = run(build, environment, environment)
    assert built.returncode == 0, built.stdout
    installed = run(install, environment, environment)
    assert installed.returncode == 0, installed.stdout
    assert "Successfully installed zerotrain" in installed.stdout
    where = run("python -c 'import zerotrain; print(zerotrain.__file__)'", environment, tmp_path).stdout
    assert where.startswith(str(environment / "env"))
    # One conf: what the wheel holds is what the clone shows.
    [packaged] = (environment / "env/lib").glob("python*/site-packages/zerotrain/conf")
    shown = {path.relative_to(REPOSITORY / "conf"): path.read_text() for path in (REPOSITORY / "conf").rglob("*.yaml")}
    assert {path.relative_to(packaged): path.read_text() for path in packaged.rglob("*.yaml")} == shown
    assert len({*packaged.parent.glob("report/page.*")}) == len({*REPOSITORY.glob("zerotrain/report/page.*")}) == 4

    mine = tmp_path / "my_conf/experiment/mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text("# @package _global_\ntrain:\n  seed: 3\n")
    refused = run(launches[0], environment, tmp_path)
    assert refused.returncode == 2
    assert (
        refused.stdout
        == "my_conf/experiment/mine.yaml, line 3: train.seed: there is no such setting; did you mean seed?\n"
    )
    mine.write_text("# @package _global_\nseed: 3\n")
    hashes = []
    for number, launch in enumerate(launches):
        ran = run(f"{launch} {' '.join(TINY)} hydra.run.dir=run{number}", environment, tmp_path)
        assert ran.returncode == 0, ran.stdout
        hashes.append(
            (result_of(tmp_path / f"run{number}")["weights_sha256"], result_of(tmp_path / "run0")["world_size"])
        )
    assert hashes[0] == hashes[1]
    assert hashes[0][1] == 2

    told = run("zerotrain --version && zerotrain --help", environment, tmp_path)
    assert told.returncode == 0
    assert told.stdout.startswith(f"zerotrain {__version__}, torch ")
    swept = run(f"zerotrain -m zero.stage=0,3 {' '.join(TINY)} hydra.sweep.dir=sweep", environment, tmp_path)
    assert swept.returncode == 0, swept.stdout
    assert "weights: 2 of 2 jobs have the same sha256" in swept.stdout
    after = "zerotrain report sweep --out page && zerotrain inspect run0"
    used = run(after, environment, tmp_path)
    assert used.returncode == 0, used.stdout
    assert (tmp_path / "page/report.html").is_file()


def test_a_wheel_of_the_source_distribution_is_that_of_the_clone(environment: Path, tmp_path: Path):
    build = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"

    def built(folder: Path, what: str, out: str) -> Path:
        done = subprocess.run([sys.executable, "-c", build, what, tmp_path / out], cwd=folder, capture_output=True)
        assert done.returncode == 0, done.stderr
        [path] = (tmp_path / out).iterdir()
        return path

    sources = built(environment, "build_sdist", "sdist")
    shutil.unpack_archive(sources, tmp_path / "unpacked", filter="data")
    [unpacked] = (tmp_path / "unpacked").iterdir()
    assert unpacked.name == f"zerotrain-{__version__}"
    names = [ZipFile(built(folder, "build_wheel", folder.name)).namelist() for folder in (environment, unpacked)]
    assert sorted(names[0]) == sorted(names[1])
