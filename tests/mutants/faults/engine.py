"""Faults of gradients, weights, updates and the schedule."""

from tests.mutants.changes import Always, Argument, Drop, Swap, Without
from tests.mutants.fault import Fault

FAULTS = {
    "one-owner-for-all": Fault(
        "assign_owners",
        Swap("load.index(min(load))", "0"),
        "one rank updates all whole tensors, and the others wait",
        ("unit/sharding/test_layout.py::test_owners_share_the_cost_of_every_bucket_and_of_all",),
    ),
    "groups-in-one-span": Fault(
        "BucketSpec.__post_init__",
        Swap("managed.span", "(0, 0)"),
        "parameters of one group get the hyperparameters of another",
        (
            "unit/engine/buckets/test_update.py::test_each_group_of_a_bucket_is_one_tensor_to_the_optimizer_and_has_its_own_rate",
        ),
    ),
    "shards-not-aligned": Fault(
        "BucketLayout.pack",
        Without("ALIGN_NUMEL"),
        "a block of 64 elements lies on two ranks, and the norm depends on how many there are",
        ("unit/sharding/test_layout.py::test_every_slot_and_every_shard_starts_aligned_and_shards_tile_the_bucket",),
    ),
    "drop-does-not-wait": Fault(
        "BucketReduction.drop",
        Drop("_finish_gather"),
        "the next gradient is filled into what a gather still writes",
        ("unit/engine/buckets/test_gradient.py::test_dropped_at_stage_0_it_waits_for_the_gather_that_is_under_way",),
    ),
    "zeros-not-filled": Fault(
        "Segment.move",
        Swap("not self.holds_values", "False"),
        "an unused parameter gets what the buffer held before",
        ("unit/engine/buckets/test_gradient.py::test_small_and_large_gradients_are_moved_and_what_has_none_is_zero",),
    ),
    "values-held-for-ever": Fault(
        "BucketGradient._end_filling",
        Drop("holds_values"),
        "the next step's gradient is added to what a buffer holds",
        (
            "unit/engine/buckets/test_gradient.py::test_a_parameter_without_a_gradient_counts_as_zeros_whatever_its_place_held",
        ),
    ),
    "accumulated-in-16-bits": Fault(
        "BucketGradient.begin_filling",
        Swap("not backward.reduces and self.precision.separate_master", "False"),
        "micro-batches are added with eight bits",
        ("unit/engine/buckets/test_gradient.py::test_in_bf16_micro_batches_are_added_in_fp32_and_rounded_once",),
    ),
    "earlier-sum-lost": Fault(
        "BucketReduction.finish",
        Drop("copy_"),
        "the first of two reduced backwards is forgotten",
        ("unit/engine/buckets/test_gradient.py::test_a_second_reduced_backward_adds_to_the_first",),
    ),
    "gradient-stays-with-its-parameter": Fault(
        "Segment.move",
        Drop("forget"),
        "the next backward adds to a gradient that was moved already",
        (
            "unit/engine/buckets/test_gradient.py::test_the_mean_over_ranks_is_cut_into_shards_and_zero_between_and_behind_the_parameters",
        ),
    ),
    "loss-scale-in-the-norm": Fault(
        "BucketReduction.take_squares",
        Swap("loss_scale ** 2", "loss_scale"),
        "the norm, and what is clipped by it, grows with the root of the loss scale",
        ("unit/engine/buckets/test_gradient.py::test_a_loss_scale_is_left_in_the_sum_and_taken_out_of_the_norm",),
    ),
    "gathered-gradient-not-waited-for": Fault(
        "BucketReduction.reduced",
        Drop("_finish_gather"),
        "stage 0 updates with what has not arrived",
        (
            "unit/engine/buckets/test_gradient.py::test_the_mean_over_ranks_is_cut_into_shards_and_zero_between_and_behind_the_parameters",
        ),
    ),
    "infinity-of-no-row": Fault(
        "digit_sums",
        Argument("stack", 0, "[highest, *sums]"),
        "what is not finite skips no step",
        ("unit/engine/buckets/test_norm.py::test_one_element_that_is_not_finite_makes_the_norm_nan",),
    ),
    "digit-of-the-first-row": Fault(
        "add_digit_sums",
        Swap("rows[:, 0].max()", "rows[0, 0]"),
        "a larger gradient of another rank leaves the norm",
        (
            "unit/engine/buckets/test_norm.py::test_the_squares_of_a_step_are_those_of_its_buckets_however_many_are_kept",
        ),
    ),
    "leaf-not-rounded": Fault(
        "BucketGradient.close_leaf",
        Drop("copy_"),
        "in 16 bits a leaf has other bits where its rank runs another",
        ("unit/engine/test_virtual_ranks.py::test_any_number_of_ranks_comes_to_the_bits_of_plain_pytorch",),
    ),
    "let-go-does-not-wait": Fault(
        "BucketWeights.let_go",
        Drop("finish_gather"),
        "a gather writes into memory that has another owner",
        ("unit/engine/buckets/test_weights.py::test_let_go_its_parameters_have_their_class_again",),
    ),
    "memory-not-freed": Fault(
        "BucketWeights.reshard",
        Drop("release"),
        "stage 3 holds all weights",
        ("unit/engine/buckets/test_weights.py::test_a_reshard_frees_the_memory_of_sharded_parameters_alone",),
    ),
    "part-of-the-world": Fault(
        "BucketWeights.__init__",
        Swap("collectives.shards", "collectives.world"),
        "where not all ranks share the shards, a rank takes the part of another",
        (
            "unit/engine/buckets/test_weights.py::test_a_part_is_that_of_the_ranks_that_share_the_shards_not_of_the_world",
        ),
    ),
    "uncounted-writes-lost": Fault(
        "Writes.look",
        Without("may_be_uncounted"),
        "what is written through p.data is lost",
        ("unit/engine/test_weight_habits.py::test_weights_written_between_steps_are_trained_on",),
    ),
    "whole-master-rounded": Fault(
        "BucketUpdate._take_writes",
        Swap(
            "torch.where(held == master.to(held.dtype), master, held.to(master.dtype), out=master)",
            "master.copy_(held)",
        ),
        "in 16 bits a write to one element rounds all others",
        ("unit/engine/test_weight_habits.py::test_weights_written_between_steps_are_trained_on",),
    ),
    "data-of-another-kind-taken": Fault(
        "LiveParameter._set_data",
        Always(False, nth=1),
        "what `.double()` gives is rounded without a word",
        (
            "unit/engine/model/test_live_parameter.py::test_data_that_is_set_is_copied_and_data_of_another_kind_is_refused",
        ),
    ),
    "model-not-updated": Fault(
        "BucketUpdate.refilled",
        Drop("copy_"),
        "the model keeps old weights",
        ("unit/engine/buckets/test_update.py::test_steps_too_small_for_bf16_add_up_in_the_master_weight",),
    ),
    "factor-ignored": Fault(
        "BucketUpdate._scaled",
        Always(True, "factor"),
        "gradients are neither clipped nor freed of the loss scale",
        (
            "unit/engine/buckets/test_update.py::test_an_update_multiplies_the_gradient_with_the_factor_and_sends_sharded_weights_to_rest",
        ),
    ),
    "own-tensors-not-put-back": Fault(
        "WholeTensors._rest_of_update",
        Drop("copy_"),
        "what an owner holds itself is never updated",
        (
            "unit/engine/buckets/test_whole_tensors.py::test_every_tensor_is_updated_once_whole_by_its_owner_and_comes_back_to_where_it_lies",
        ),
    ),
    "loss-scale-stays": Fault(
        "OptimizerStep._norm",
        Without("loss_scale"),
        "gradients are too large by the loss scale",
        ("unit/engine/test_engine.py::test_the_loss_scale_is_in_the_backward_alone_not_in_norm_weights_or_clipping",),
    ),
    "overflow-not-skipped": Fault(
        "OptimizerStep.run",
        Swap("not math.isfinite(numbers.norm)", "math.isinf(numbers.norm)"),
        "weights become NaN",
        ("unit/engine/test_engine.py::test_what_is_not_finite_on_one_rank_skips_the_step_on_all",),
    ),
    "skipped-gradient-stays": Fault(
        "OptimizerStep.run",
        Drop("drop_gradients"),
        "it is added to the next",
        ("unit/engine/test_engine.py::test_what_is_not_finite_on_one_rank_skips_the_step_on_all",),
    ),
    "clipped-by-the-local-norm": Fault(
        "StepStamps.exchanged",
        Swap("add_digit_sums(digits)", "digit_sums"),
        "each rank clips by the norm of its own part",
        ("unit/engine/test_engine.py::test_the_norm_is_that_of_the_mean_over_ranks_and_clips_as_torch_does",),
    ),
    "order-not-compared": Fault(
        "StepStamps.stamp",
        Swap("self._collectives.order", "0"),
        "ranks whose collectives came in another order go on",
        (
            "unit/engine/test_engine_between_steps.py::test_ranks_whose_collectives_came_in_another_order_are_told_at_the_step",
        ),
    ),
    "scale-never-lowered": Fault(
        "Steps.step",
        Argument("update", "overflowed", "False"),
        "an overflow does not lower the loss scale",
        ("unit/engine/test_engine.py::test_what_is_not_finite_on_one_rank_skips_the_step_on_all",),
    ),
    "skipped-unit-gathers-nothing": Fault(
        "Schedule.before_backward",
        Drop("gather_ahead"),
        "a rank that skips a block reduces it before it gathers the next, the others after",
        (
            "unit/engine/schedule/test_schedule.py::test_a_rank_that_skips_blocks_issues_what_the_others_do_in_the_same_order",
        ),
    ),
    "skipped-unit-closes-all": Fault(
        "Reductions.close_passed",
        Always(False, "within"),
        "a rank that skips a block reduces it before the others do",
        (
            "unit/engine/schedule/test_schedule.py::test_a_rank_that_skips_blocks_issues_what_the_others_do_in_the_same_order",
        ),
    ),
    "late-gradient-not-told": Fault(
        "Reductions._close",
        Drop("append"),
        "a gradient that comes when its bucket was closed is lost without a word",
        ("unit/engine/test_engine_between_steps.py::test_a_gradient_that_comes_when_its_bucket_was_closed_is_told",),
    ),
    "freed-on-one-rank-alone": Fault(
        "Schedule.segment_arrived",
        Always(True, "going"),
        "the rank whose gradient came frees a weight that another keeps, and gathers it again alone",
        (
            "unit/engine/test_ranks_that_differ.py::test_ranks_that_differ_have_one_order_with_a_bucket_for_each_parameter",
        ),
    ),
    "earlier-reductions-not-finished": Fault(
        "Reductions.begin",
        Drop("finish"),
        "a second backward fills what the first one's reduction still reads",
        (
            "unit/engine/test_engine_between_steps.py::test_gradients_add_up_until_the_step_and_what_is_given_up_leaves_nothing",
        ),
    ),
    "freed-within-the-outer-unit": Fault(
        "Gathers.after_forward",
        Without("any"),
        "a unit that calls another of its bucket finds it freed",
        (
            "unit/engine/schedule/test_gathers.py::test_behind_a_unit_within_another_a_bucket_that_the_outer_one_needs_stays_full",
        ),
    ),
    "stage-3-gathers-behind-the-update": Fault(
        "Gathers.__init__",
        Swap("self.plan.shards_optimizer and (not self.plan.shards_parameters)", "self.plan.shards_optimizer"),
        "stage 3 is whole between steps",
        (
            "unit/engine/schedule/test_gathers.py::test_updated_weights_are_gathered_at_once_where_only_the_optimizer_is_sharded",
        ),
    ),
    "goes-unasked": Fault(
        "Reductions.reduce_complete",
        Always(False, "going"),
        "a complete bucket is reduced before the place where every rank closes it",
        (
            "unit/engine/schedule/test_schedule.py::test_models_whose_backward_is_unusual_have_one_order_too_and_the_bits_of_stage_0",
        ),
    ),
    "called-between-engine-calls": Fault(
        "Schedule.before_forward",
        Drop("if", nth=0),
        "a rank that calls a part of the model between steps waits for ranks that do not",
        (
            "unit/engine/schedule/test_schedule.py::test_a_part_of_the_model_that_is_called_between_engine_calls_is_refused_where_weights_are_sharded",
        ),
    ),
    "not-drained": Fault(
        "_disconnect",
        Drop("drain"),
        "a deleted engine leaves ranks waiting",
        (
            "unit/engine/schedule/test_hooks.py::test_without_its_owner_no_hook_is_left_and_what_is_under_way_was_waited_for",
        ),
    ),
    "passed-too-early": Fault(
        "LiveUnit._entered",
        Swap(">=", ">"),
        "a unit counts as passed while its first node is still to run",
        (
            "unit/engine/test_ranks_that_differ.py::test_ranks_that_differ_have_one_order_with_a_bucket_for_each_parameter",
        ),
    ),
}
