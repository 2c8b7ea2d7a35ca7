"""`zerotrain slurm`: a file that sbatch takes, and settings that are checked before a job waits."""

import shlex
import sys
from pathlib import Path

import pytest

from zerotrain.commands.slurm import main

MODULE = f"exec srun {shlex.quote(sys.executable)} -m zerotrain launch.requeue=true"


def test_the_file_has_the_options_given_those_of_a_run_that_goes_on_and_the_settings(capsys):
    given = ["--nodes=2", "-c", "4", "--signal=USR2@300", "--exclusive", "--", "zero.stage=3", "data.path=a b"]
    assert main(given) == 0
    assert capsys.readouterr().out.splitlines() == [
        "#!/bin/bash",
        "#SBATCH --nodes=2",
        "#SBATCH -c 4",
        "#SBATCH --signal=USR2@300",
        "#SBATCH --exclusive",
        "#SBATCH --job-name=zerotrain",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "# Each task is a rank. At SIGUSR1 they save; rank 0 queues the job again, which goes on in its folder.",
        f"{MODULE} zero.stage=3 'data.path=a b'",
    ]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["--", "zero.stge=3"], "zero.stge: there is no such setting; did you mean zero.stage?"),
        (["--nodes=2", "zero.stage=3"], "zero.stage=3: it is no option of sbatch; settings stand behind --, as in "),
        (["--wrap=ls"], "--wrap: it cannot stand in a file for sbatch; leave it out"),
        (["--comment=a\nrm -rf x"], "--comment: it cannot stand in a file for sbatch; leave it out"),
        (["=\n"], "=\\n: it cannot stand in a file for sbatch; leave it out"),
        (["--submit", "--nodes=1"], "--submit: sbatch cannot be run on this machine: No such file or directory; leave"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_submitted(monkeypatch, tmp_path, capsys, given, line) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(given) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(line)


@pytest.mark.parametrize("code", [0, 7])
def test_sbatch_gets_the_file_and_its_refusal_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/sh\n/bin/cat > {tmp_path}/got\nexit {code}\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["--ntasks=4", "--submit", "--", "seed=3"]) == int(code != 0)
    assert (tmp_path / "got").read_text().splitlines()[1] == "#SBATCH --ntasks=4"
    assert (tmp_path / "got").read_text().endswith(f"{MODULE} seed=3\n")
