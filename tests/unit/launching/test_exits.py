"""What signals do once the ranks of a job have ended."""

import signal
from contextlib import nullcontext
from pathlib import Path

import pytest

from zerotrain.config.schema import Config
from zerotrain.launching import spawn
from zerotrain.launching.exits import STOP_SIGNALS
from zerotrain.launching.failures import RunError
from zerotrain.launching.job import Job
from zerotrain.launching.resuming import Attempts


@pytest.fixture
def before():
    """The handlers before a job, which later tests get back whatever it leaves."""
    handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    yield handlers
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize(("module", "fails"), [("platform", False), ("no_such_module", True)])
def test_signals_are_handled_after_a_job_as_before_it(tmp_path: Path, monkeypatch, before, module: str, fails: bool):
    """Handlers that were left would take Ctrl-C between two jobs of a sweep."""
    monkeypatch.setattr(spawn, "RANK_MODULE", module)  # what a rank runs: a second less than a training
    job = Job(config=Config(), run_dir=tmp_path, overrides=[])
    job.open_folder()
    with pytest.raises(RunError, match="ended with exit code 1") if fails else nullcontext():
        spawn.run_ranks(Attempts(job), 1)
    assert {signum: signal.getsignal(signum) for signum in STOP_SIGNALS} == before
