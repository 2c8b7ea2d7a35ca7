"""The main module of a rank, for `spawn`. It imports torch only when it can be ended quietly."""

import signal
import sys
from pathlib import Path


def main(job_path: str) -> None:
    """Run this process's rank of the job in a file of `spawn`; end the process if it fails."""
    # Until the run can be stopped in order, Ctrl-C ends the process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from zerotrain.device.processes import end_with_parent
    from zerotrain.launching.imports import importing

    end_with_parent()
    with importing():
        from zerotrain.comm.environment import RankEnvironment
        from zerotrain.launching import exits, job, worker

    ranks = RankEnvironment.read()
    assert ranks is not None
    try:
        worker.run_rank(job.Job.from_json(Path(job_path).read_bytes()), ranks)
    except KeyboardInterrupt:
        worker.exit_now(exits.of_signal(signal.SIGINT))
    except (Exception, SystemExit):  # is in the log, and the process that started this one says it
        worker.exit_now(exits.FAILED)


if __name__ == "__main__":
    main(*sys.argv[1:])
