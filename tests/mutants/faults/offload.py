"""What lies off the device: that it arrives before it is used, leaves before it is overwritten, and fails in words."""

from tests.mutants.fault import Fault

HOME, UPDATE = "engine/buckets/places/home.py", "engine/buckets/update.py"
DISK, FILE, WINDOWS = "offload/disk.py", "offload/scratch_file.py", "offload/windows.py"
OF_ENGINE = ("unit/engine/test_offload.py",)
OF_WRITES = ("unit/engine/test_offload.py::test_what_users_write_into_parameters_is_kept",)
OF_FILE = ("unit/offload/test_scratch_file.py",)
OF_DISK = ("unit/offload/test_disk.py",)
OF_WINDOWS = ("unit/offload/test_windows.py",)

FAULTS = {
    "outgrown-places-kept": Fault(
        "engine/buckets/places/home.py",
        "        self._point_to(place.memory)\n        self._windows.tier.free(self._place)\n",
        "        self._point_to(place.memory)\n",
        "state that outgrows its place keeps the old one",
        ("unit/engine/test_offload.py::test_an_optimizer_may_replace_its_tensors_and_make_more_of_them",),
    ),
    "offload-written-shards-not-fetched": Fault(
        UPDATE,
        "open(replaced=self.has_copy and not self._weights.writes.are_new)",
        "open(replaced=self.has_copy)",
        "what users wrote into 16-bit shards is read from a window that holds anything",
        OF_WRITES,
    ),
    "offload-fetched-before-it-has-left": Fault(
        HOME,
        "            stored = tier.settled(self._leaving)\n",
        "            stored = DONE\n",
        "a bucket is read while its last update is still being written",
        ("unit/engine/test_offload.py::test_what_is_fetched_anew_has_left_before",),
    ),
    "offload-reads-the-mapping": Fault(
        "engine/state/saving/snapshot.py",
        "return values if bucket is None else bucket.at_rest(values)",
        "return values",
        "a disk that fails while a save reads it ends the process by SIGBUS",
        ("unit/engine/test_offload.py::test_a_disk_that_fails_a_save_is_named_and_training_goes_on",),
    ),
    "offload-window-used-too-soon": Fault(
        WINDOWS,
        "window.unused = self.tier.settled(last)",
        "window.unused = Event()",
        "a window is read into while it is still written from",
        OF_WINDOWS,
    ),
    "offload-waits-for-the-first": Fault(
        "offload/transfer.py",
        "errors = [error for part in self._parts if (error := part.exception()) is not None]",
        "errors = [error for part in self._parts[:1] if (error := part.exception()) is not None]",
        "pieces behind the first are used before they are there",
        OF_WINDOWS,
    ),
    "offload-gaps-overlap": Fault(
        DISK,
        "            self._nbytes[start + nbytes] = rest\n",
        "            self._nbytes[start] = rest\n",
        "two buckets lie in the same bytes of the file",
        OF_DISK,
    ),
    "offload-looks-beside": Fault(
        DISK,
        "return memory[start - first : start - first + nbytes]",
        "return memory[:nbytes]",
        "a save reads the bytes before those it wants",
        OF_DISK,
    ),
    "offload-short-reads-believed": Fault(
        FILE,
        "            done += count\n",
        "            done = len(part)\n",
        "the end of a window keeps what was there before",
        OF_ENGINE,
    ),
    "offload-file-has-a-name": Fault(
        FILE,
        "            os.unlink(path)\n",
        "            pass\n",
        "a killed run leaves its file, as large as its state",
        OF_FILE,
    ),
    "offload-refused-blocks-end-the-run": Fault(
        FILE,
        "if error.errno == errno.EINVAL and descriptor != self._cached:",
        "if error.errno == errno.ENOSYS and descriptor != self._cached:",
        "a file system that wants larger blocks for direct access cannot be offloaded to",
        OF_FILE,
    ),
    "offload-sample-fills-the-disk": Fault(
        "offload/rates.py",
        "nbytes = min(SAMPLE_NBYTES, tier.placed_nbytes or SAMPLE_NBYTES)",
        "nbytes = SAMPLE_NBYTES",
        "a disk that has room for all that is offloaded is refused",
        OF_DISK,
    ),
    "offload-sample-not-counted": Fault(
        "run/preflight/room.py",
        "return round(needed + sample)",
        "return round(needed)",
        "a disk that is full by its measurement is found when the ranks have started",
        ("unit/run/preflight/test_room.py",),
    ),
}
