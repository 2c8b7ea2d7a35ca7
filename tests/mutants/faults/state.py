"""Faults of the engine's state, checkpoints and offloading."""

from tests.mutants.changes import Always, Drop, Swap
from tests.mutants.fault import Fault

FAULTS = {
    "values-from-16-bits": Fault(
        "capture",
        Swap("current_weight(bucket)", "bucket.weights.held.float()"),
        "full weights, and those that move, are rounded",
        "unit/engine/state/test_from_buckets.py::test_whatever_was_frozen_wherever_it_lay_weights_and_average_are_those_of_plain_pytorch",
    ),
    "moved-to-the-old-place": Fault(
        "OtherBuckets._joined",
        Swap("slot_view(values, old_slot)", "slot_view(values, slot)"),
        "momentum is taken from where a parameter will lie, not from where it lay",
        "unit/engine/state/test_from_buckets.py::test_whatever_was_frozen_wherever_it_lay_weights_and_average_are_those_of_plain_pytorch",
    ),
    "weights-not-shared": Fault(
        "Builder._bucket",
        Drop("broadcast"),
        "other ranks begin with zeros",
        "unit/engine/test_build.py::test_every_rank_begins_with_the_weights_and_the_buffers_of_rank_0",
    ),
    "cut-over-the-world": Fault(
        "Builder.schedule",
        Swap("spec.layout(num_ranks, shard_size)", "spec.layout(self._collectives.world.size, shard_size)"),
        "where not all ranks share the shards, buckets are cut for too many",
        "unit/engine/test_build.py::test_a_layout_is_cut_over_the_ranks_that_share_the_shards_not_over_the_world",
    ),
    "switch-keeps-the-old-part": Fault(
        "OtherBuckets.hand_over",
        Swap("values[where.start - held.start:where.stop - held.start]", "values[:where.stop - where.start]"),
        "after a change of the stage every rank goes on with the first elements of the optimizer's state",
        "unit/engine/test_set_stage.py::test_the_stage_changes_in_mid_run_and_the_bits_do_not",
    ),
    "loaded-on-rank-0-alone": Fault(
        "StateDict.begin",
        Drop("broadcast"),
        "each rank loads what it was given itself",
        "unit/engine/state/test_from_weights.py::test_what_was_taken_out_trains_on_to_the_same_bits_in_another_engine",
    ),
    "master-not-loaded": Fault(
        "replaced_weights",
        Always(False),
        "in 16 bits the master weights stay what they were",
        "unit/engine/state/test_from_weights.py::test_what_was_taken_out_trains_on_to_the_same_bits_in_another_engine",
    ),
    "agreed-whatever-was-given": Fault(
        "agreed",
        Swap("_hash(repr([arguments, facts]))", "0"),
        "ranks that were given other things go on with them",
        "unit/engine/state/test_together.py::test_each_fact_that_differs_is_a_line_on_every_rank",
    ),
    "agreed-whoever-refuses": Fault(
        "agreed",
        Swap("int(error is not None)", "0"),
        "what one rank refuses the others do",
        "unit/engine/state/test_together.py::test_what_one_rank_refuses_all_tell_with_its_rank",
    ),
    "start-half": Fault(
        "ShardedModel.replaced",
        Always(True, "mends"),
        "a few weights that are loaded hide that the others are of two trainings",
        "unit/engine/state/test_from_weights_refused.py::test_a_disk_that_fails_in_the_midst_leaves_an_engine_that_trains_when_it_is_whole_again",
    ),
    "saves-old-state-stays": Fault(
        "fill_state",
        Drop("clear"),
        "a checkpoint from before the first step leaves the momentum of the engine that loads it",
        "unit/checkpoint/test_exactness.py::test_an_engine_that_has_trained_goes_back_and_one_that_has_not_can_be_saved",
    ),
    "freeze-in-mid-step": Fault(
        "ShardedModel.require_no_gradient",
        Always(False),
        "a gradient that waits is lost when what trains is changed",
        "unit/engine/state/test_from_buckets.py::test_while_a_gradient_waits_what_trains_cannot_change",
    ),
    "checkpoint-hashes-ignored": Fault(
        "Reader._read_block",
        Always(False, "hash_of"),
        "a flipped byte is trained on",
        "unit/checkpoint/test_damage.py::test_a_flipped_byte_is_found_wherever_it_lies_and_file_and_tensor_are_named",
    ),
    "checkpoint-manifest-believed": Fault(
        "parse_manifest",
        Always(False, "hash_of"),
        "an edited manifest is trained on",
        "unit/checkpoint/test_damage.py::test_what_was_damaged_is_refused_by_all_ranks_before_anything_has_changed",
    ),
    "checkpoint-checked-too-late": Fault(
        "verified_manifest",
        Always(False, "problems_in"),
        "a damaged checkpoint is found when half of the engine is overwritten",
        "unit/checkpoint/test_damage.py::test_what_was_damaged_is_refused_by_all_ranks_before_anything_has_changed",
    ),
    "checkpoint-replaces": Fault(
        "require_new",
        Swap("os.path.lexists", "os.path.isfile"),
        "a save takes the place of an empty folder that somebody made",
        "unit/checkpoint/test_interrupted.py::test_what_has_the_name_already_is_not_replaced",
    ),
    "checkpoint-not-synced": Fault(
        "PartialFolder.appear",
        Drop("sync", nth=0),
        "after a power cut the folder has its name and lacks its files",
        "unit/checkpoint/test_interrupted.py::test_all_of_it_is_on_the_disk_before_it_has_its_name_and_then_the_name_is",
    ),
    "checkpoint-all-ranks-save-all": Fault(
        "owned_pieces",
        Swap("bucket.update.owners[bucket.spec.parameters.index(piece.managed)] != rank", "rank != 0"),
        "what another rank than the first owns whole is not saved",
        "unit/checkpoint/test_placements.py::test_another_stage_number_of_ranks_and_size_of_buckets_goes_on_as_the_run_that_saved",
    ),
    "checkpoint-counts-forgotten": Fault(
        "Checkpoint.keeps",
        Swap("saved.counts.items()", "()"),
        "the optimizer counts its steps anew, and its bias correction with them",
        "unit/checkpoint/test_placements.py::test_another_stage_number_of_ranks_and_size_of_buckets_goes_on_as_the_run_that_saved",
    ),
    "checkpoint-newest-removed": Fault(
        "remove_old",
        Swap("-max(keep, 1)", "max(keep, 1)"),
        "the oldest stay and the newest go",
        "unit/checkpoint/test_folder.py::test_the_newest_and_every_so_many_steps_stay",
    ),
    "checkpoint-update-copies-nothing": Fault(
        "JointUpdate.run",
        Drop("about_to_change"),
        "a save beside training has some buckets of this step and some of the next",
        "unit/checkpoint/test_beside_training.py::test_training_beside_a_save_comes_to_the_same_bits_and_the_state_at_its_begin_is_saved",
    ),
    "checkpoint-changed-while-read": Fault(
        "Snapshot.keep",
        Swap("self._under_way is not bucket and self._fits(bucket)", "self._fits(bucket)"),
        "an update begins while the thread reads the bucket: some MiB are of two steps",
        "unit/checkpoint/test_beside_training.py::test_what_changes_the_state_during_a_save_waits_or_copies",
    ),
    "checkpoint-buffers-not-copied": Fault(
        "_Plan.file",
        Swap("values.detach().reshape(-1).clone()", "values.detach().reshape(-1)"),
        "a batch norm's statistics are of a later step than the weights",
        "unit/checkpoint/test_beside_training.py::test_training_beside_a_save_comes_to_the_same_bits_and_the_state_at_its_begin_is_saved",
    ),
    "saves-of-the-living-removed": Fault(
        "_remove_if_dead",
        Always(True, "can_lock"),
        "a save into the same folder removes another one that is under way",
        "unit/checkpoint/test_interrupted.py::test_a_name_that_is_taken_while_the_save_runs_is_not_replaced",
    ),
    "lengths-best-removed": Fault(
        "remove_old",
        Swap("best_in(folder)", "None"),
        "the best checkpoint goes when newer ones are saved",
        "unit/training/callbacks/test_checkpoints.py::test_the_best_stays_beside_the_newest_and_the_link_names_it",
    ),
    "reading-bytes-of-two": Fault(
        "_place_problems",
        Always(False, "byte"),
        "two tensors are read out of the same bytes",
        "unit/checkpoint/test_forged.py::test_a_forged_manifest_is_refused_in_one_line_and_nothing_is_loaded",
    ),
    "offload-fetched-before-it-has-left": Fault(
        "OffloadedHome.fetch",
        Swap("tier.settled(self._leaving)", "DONE"),
        "a bucket is read while its last update is still being written",
        "unit/engine/test_offload.py::test_what_is_fetched_anew_has_left_before",
    ),
    "offload-window-used-too-soon": Fault(
        "Windows.take",
        Swap("self.tier.settled(transfer)", "Event()"),
        "a window is read into while it is still written from",
        "unit/offload/test_tier.py::test_the_oldest_is_used_again_once_there_are_enough_and_its_last_copy_is_waited_for",
    ),
    "offload-gaps-overlap": Fault(
        "Gaps.take",
        Swap("start + nbytes", "start"),
        "two buckets lie in the same bytes of the file",
        "unit/offload/test_disk.py::test_the_smallest_gap_that_fits_is_used_and_its_rest_stays",
    ),
    "saved-before-it-was-written": Fault(
        "SavedTensors.store",
        Swap("stored.version == tensor._version", "True"),
        "a backward uses what a memory held before the forward wrote into it",
        "unit/engine/test_offload_activations.py::test_a_memory_that_was_written_to_is_saved_anew",
    ),
}
