"""One process at a time makes what is in a folder, also where another one removes that meanwhile."""

import shutil
import threading
from pathlib import Path

from zerotrain.data.prepare import LOCK_NAME, sole_writer, try_lock


def test_who_has_waited_for_a_folder_that_was_removed_locks_the_one_that_is_there(tmp_path: Path) -> None:
    """A lock of a file without a name keeps nobody out."""
    folder, inside, done = tmp_path / "store", threading.Event(), threading.Event()

    def write() -> None:
        with sole_writer(folder, private=True):
            inside.set()
            done.wait(20.0)

    with sole_writer(folder, private=True):
        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        assert not inside.wait(0.3)
        shutil.rmtree(folder)  # as one that is abandoned
    assert inside.wait(20.0)
    assert (folder / LOCK_NAME).is_file()
    assert try_lock(folder) is None
    done.set()
    writer.join(20.0)
    free = try_lock(folder)
    assert free is not None
    free.close()
