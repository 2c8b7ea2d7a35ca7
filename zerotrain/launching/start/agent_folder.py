"""The folder of files that a launcher and its ranks meet through, which goes with the launcher, however that ends."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_REMOVE_BEHIND_US = 'read _; for second in 1 2 3 4 5; do rm -rf "$0" && exit; sleep 1; done'
"""Of a shell whose input ends with this process: ranks that are about to end may still write there."""


@contextmanager
def agent_folder() -> Iterator[str]:
    """A folder in TMPDIR that only its owner may read. `kill -9` left it, with the job in it (2026-11-23)."""
    with tempfile.TemporaryDirectory(prefix="zerotrain_") as folder:
        remover = None
        with suppress(OSError):  # no process to be had: it is removed but for kill -9
            # In a session of its own, which no Ctrl-C reaches.
            remover = subprocess.Popen(
                ["/bin/sh", "-c", _REMOVE_BEHIND_US, folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        try:
            yield folder
        finally:
            if remover is not None:
                remover.communicate()
