"""Each ending, by each way to start two ranks. The rows of srun run in a real Slurm."""

import os
import subprocess
import sys

import pytest
from commands import REPOSITORY, TINY, USER_CODE, result_of

from tests.cluster.endings import ENDINGS, STARTERS

RUN = (*TINY, "train.max_steps=4", "hydra.run.dir=run", "launch.device=cpu", "launch.timeout_s=60")
LAUNCH = [sys.executable, str(REPOSITORY / "launch.py")]
COMMANDS = {
    "launch.py": [*LAUNCH, "launch.nproc_per_node=2"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", LAUNCH[1]],
    "srun": ["srun", "--ntasks=2", "--partition=all", "--quiet", *LAUNCH],
}


@pytest.mark.parametrize("starter", STARTERS)
@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.name)
def test_an_ending_has_the_code_that_the_page_tells(request, tmp_path, ending, starter) -> None:
    code = ending.codes[STARTERS.index(starter)]
    if code is None:
        pytest.skip("srun starts its tasks in a job")
    of_starter = ending.environment
    if starter == "srun":
        of_starter = {"SLURM_CONF": request.getfixturevalue("slurm")}
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{USER_CODE}", "OMP_NUM_THREADS": "1", **of_starter}
    if ending.control is not None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run/control.yaml").write_text(ending.control)
    command = [*COMMANDS[starter], *RUN, *ending.settings]
    for _ in range(ending.num_starts):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    if ending.status is not None:
        assert result_of(tmp_path / "run")["status"] == ending.status
    told = subprocess.run(
        [sys.executable, "-m", "zerotrain", "ended", "run"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert told.returncode == ending.ended, told.stdout
