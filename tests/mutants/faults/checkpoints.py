"""What is saved, what is read back, and what of it is believed."""

from tests.mutants.fault import Fault

OWNED, RESTORE = "engine/state/owned.py", "engine/state/sources/checkpoint.py"
OF_DAMAGE = ("unit/checkpoint/test_damage.py",)
OF_PLACEMENTS = ("unit/checkpoint/test_placements.py",)
OF_EXACTNESS = ("unit/checkpoint/test_exactness.py",)
OF_INTERRUPTED = ("unit/checkpoint/test_interrupted.py",)
OF_START = ("unit/engine/state/sources/test_files.py", "unit/engine/state/sources/test_files_refused.py")
START, MATCH = "engine/state/sources/files.py", "engine/state/sources/match.py"
OF_KEPT = ("unit/checkpoint/test_kept.py",)
OF_BESIDE = ("unit/checkpoint/test_beside_training.py",)

FAULTS = {
    "room-never-given-back": Fault(
        "engine/state/saving/snapshot.py",
        "                self._held_nbytes -= copy.nbytes\n",
        "                pass\n",
        "after a save's first copy there is never room, and training waits for the disk",
        (
            "unit/checkpoint/test_beside_training.py::"
            "test_what_was_copied_and_is_written_makes_room_for_the_next_bucket",
        ),
    ),
    "how-to-compute-from-the-file": Fault(
        "engine/groups/hyperparameters.py",
        "        if name not in OF_THIS_MACHINE:\n",
        "        if name:\n",
        "an update is computed as on the machine that saved, which may have had a GPU",
        ("unit/engine/groups/test_hyperparameters.py",),
    ),
    "load-before-its-folder-is-there": Fault(
        "engine/checkpoints.py",
        '"a checkpoint cannot be loaded", path)\n        self._held.wait_until_save_ended()\n',
        '"a checkpoint cannot be loaded", path)\n        self._held.wait_until_saved()\n',
        "a load of what is being saved finds no folder",
        ("unit/checkpoint/test_beside_training.py",),
    ),
    "checkpoint-hashes-ignored": Fault(
        "checkpoint/reading.py",
        "if (found := hash_of(block)) != hashes[index]:",
        "if (found := hash_of(block)) == '':",
        "a flipped byte is trained on",
        OF_DAMAGE,
    ),
    "checkpoint-manifest-believed": Fault(
        "checkpoint/manifest.py",
        "    if told != hash_of(_canonical(content)):\n",
        "    if told is None:\n",
        "an edited manifest is trained on",
        OF_DAMAGE,
    ),
    "checkpoint-checked-too-late": Fault(
        RESTORE,
        "        if problems := problems_in(folder, manifest, collectives.shards.rank, collectives.shards.size):\n",
        "        if problems := []:\n",
        "a damaged checkpoint is found when half of the engine is overwritten",
        OF_DAMAGE,
    ),
    "checkpoint-replaces": Fault(
        "checkpoint/folder.py",
        "    if os.path.lexists(path):\n",
        "    if os.path.isfile(path):\n",
        "a save takes the place of an empty folder that somebody made",
        OF_INTERRUPTED,
    ),
    "checkpoint-not-synced": Fault(
        "checkpoint/folder.py",
        "        sync_folder(self.path)\n        require_new",
        "        require_new",
        "after a power cut the folder has its name and lacks its files",
        OF_INTERRUPTED,
    ),
    "checkpoint-dead-saves-stay": Fault(
        "checkpoint/folder.py",
        "        remove_dead(target.parent)\n",
        "",
        "each killed save costs the disk its size for good",
        OF_INTERRUPTED,
    ),
    "checkpoint-all-ranks-save-all": Fault(
        OWNED,
        "if bucket.update.owners[bucket.spec.parameters.index(piece.managed)] == rank:",
        "if rank == 0:",
        "what another rank than the first owns whole is not saved",
        OF_PLACEMENTS,
    ),
    "checkpoint-counts-forgotten": Fault(
        RESTORE,
        'for name, value in saved["counts"].items():',
        "for name, value in ():",
        "the optimizer counts its steps anew, and its bias correction with them",
        OF_PLACEMENTS,
    ),
    "checkpoint-writes-forgotten": Fault(
        "engine/buckets/weights.py",
        "            self.start_gather()\n            self.finish_gather()\n        self.writes.start_anew()\n",
        "            self.start_gather()\n            self.finish_gather()\n",
        "a graph from before a load is differentiated with the weights that were loaded",
        OF_EXACTNESS,
    ),
    "checkpoint-generations-forgotten": Fault(
        "engine/groups/param_groups.py",
        "            self._generation[parameter] = generation\n",
        "",
        "what began to train late is updated with the count of steps of the others",
        OF_EXACTNESS,
    ),
    "checkpoint-buffers-of-rank-0": Fault(
        RESTORE,
        "rank = shards.rank if self._manifest.num_ranks == shards.size and shards.rank in by_rank else 0",
        "rank = 0",
        "batch norms of all ranks go on with the statistics of the first",
        OF_EXACTNESS,
    ),
    "checkpoint-removed-under-its-name": Fault(
        "checkpoint/kept.py",
        "                    path.rename(name)\n                    hidden[path] = name\n",
        "                    hidden[path] = path\n",
        "a removal that is killed leaves half a checkpoint, which the next run loads first",
        OF_KEPT,
    ),
    "checkpoint-removed-before-its-name": Fault(
        "checkpoint/kept.py",
        "                problems.append(_sentence(error, path))\n        sync_folder(folder)\n",
        "                problems.append(_sentence(error, path))\n",
        "after a power cut a checkpoint has its name back and lacks its files",
        OF_KEPT,
    ),
    "checkpoint-newest-removed": Fault(
        "checkpoint/kept.py",
        "    old = found[: -max(keep, 1)]\n",
        "    old = found[: max(keep, 1)]\n",
        "the oldest stay and the newest go",
        OF_KEPT,
    ),
    "start-order-of-memory": Fault(
        START,
        "    if order == memory_order(source.shape, stride):\n",
        "    if True:\n",
        "a transposed parameter is filled with the numbers of another place",
        OF_START,
    ),
    "start-first-of-a-shard": Fault(
        START,
        "_read(self._weights, source, piece.managed.stride, piece.in_tensor.start, piece.values)",
        "_read(self._weights, source, piece.managed.stride, 0, piece.values)",
        "every rank reads the first elements of a tensor",
        OF_START,
    ),
    "start-old-copies": Fault(
        "engine/state/fill.py",
        "            bucket.update.refilled()\n",
        "            pass\n",
        "the model computes with its old weights until the first step",
        OF_START,
    ),
    "start-other-file-believed": Fault(
        START,
        "if each != fingerprints[0]]:\n",
        "if each is None]:\n",
        "ranks whose machines have other files train a model of both",
        OF_START,
    ),
    "start-two-in-one": Fault(
        START,
        "*_two_in_one(weights, wanted, collectives)",
        "*()",
        "of a head and an embedding that were not tied one is dropped without a word",
        OF_START,
    ),
    "start-kinds": Fault(
        MATCH,
        "_kind(given.dtype) != _kind(dtype)",
        "False",
        "8-bit weights are taken without their scales",
        OF_START,
    ),
    "start-half": Fault(
        "engine/sharded_model.py",
        "        self.half_loaded = None if mends else before\n",
        "        self.half_loaded = None\n",
        "a few weights that are loaded hide that the others are of two trainings",
        OF_START,
    ),
    "checkpoint-update-copies-nothing": Fault(
        "engine/buckets/update.py",
        "        self._weights.about_to_change()\n        if self._crossing",
        "        if self._crossing",
        "a save beside training has some buckets of this step and some of the next",
        OF_BESIDE,
    ),
    "checkpoint-written-data-not-copied": Fault(
        "engine/buckets/weights.py",
        "        if not self.plan.shards_parameters:\n            self.about_to_change()\n",
        "",
        "a save beside training has what a user wrote through p.data",
        OF_BESIDE,
    ),
    "checkpoint-changed-while-read": Fault(
        "engine/state/saving/snapshot.py",
        "self._under_way is not bucket and ",
        "",
        "an update begins while the thread reads the bucket: some MiB are of two steps",
        OF_BESIDE,
    ),
    "checkpoint-buffers-not-copied": Fault(
        "engine/state/saving/save.py",
        "reshape(-1).clone()",
        "reshape(-1)",
        "a batch norm's statistics are of a later step than the weights",
        OF_BESIDE,
    ),
    "checkpoint-writes-in-place-not-found": Fault(
        "engine/state/saving/snapshot.py",
        "            if old != new:\n",
        "            if old > new:\n",
        "a weight that is written while it is saved is half old and half new in the file",
        OF_BESIDE,
    ),
}
