"""The main module of a rank, for `spawn`. It imports torch only when it can be ended quietly."""

import signal
import sys


def main(job_path: str) -> None:
    """Run a rank of the job in a file of `spawn`."""
    # Until the run can be stopped in order, Ctrl-C ends the process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from zerotrain.device.processes import end_with_parent
    from zerotrain.launching.imports import importing

    end_with_parent()
    with importing():
        from zerotrain.launching.worker import run_spawned

    run_spawned(job_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
