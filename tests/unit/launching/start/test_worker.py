import os
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

    assert allowed_nbytes(replace(job, planned={"stage": 1}), 2) == 0.5e9
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    alone, beside = allowed_nbytes(job, 1), allowed_nbytes(job, 1000)
    assert own_nbytes() * 0.9 < beside < alone < 2 * machine  # with swap
    assert alone - beside > 100 * (beside - own_nbytes())
