from dataclasses import replace
from pathlib import Path

from zerotrain.config.schema import Config
from zerotrain.device.heap import own_nbytes
from zerotrain.launching.job.job import Job
from zerotrain.launching.start.worker import allowed_nbytes


def test_a_rank_may_have_what_the_run_is_planned_for_or_else_its_share_of_what_is_left(tmp_path: Path):
    config = Config()
    config.plan.memory_gb = 0.5
    job = Job(config=config, run_dir=tmp_path, overrides=[])

    planned = replace(job, planned={"stage": 1})
    assert allowed_nbytes(planned, 2) == 0.5e9
    alone, beside = allowed_nbytes(job, 1), allowed_nbytes(job, 1000)
    assert own_nbytes() * 0.9 < beside < alone
    assert alone - beside > 100 * (beside - own_nbytes())
    config.plan.memory_gb = 1e6
    assert alone / 2 < allowed_nbytes(planned, 1) < 2 * alone
