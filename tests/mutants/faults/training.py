"""Faults of training, planning and replay."""

from tests.mutants.changes import Always, Argument, Swap, Without
from tests.mutants.fault import Fault

FAULTS = {
    "lengths-schedule-ends-late": Fault(
        "_rise_and_fall",
        Swap("max_steps - 1 - begin", "max_steps - begin"),
        "the last step of a run is above the final learning rate",
        "unit/training/test_schedule.py::test_a_rise_and_a_fall_are_those_of_torch",
    ),
    "feeds-next-schedule-of-all-steps": Fault(
        "Trainer._train",
        Without("result"),
        "a skipped step counts as an update to the schedule",
        "unit/training/test_trainer.py::test_a_skipped_step_is_a_step_of_the_run_but_not_of_the_schedule",
    ),
    "feeds-weighs-by-ranks": Fault(
        "TrainingFeed._parts_of",
        Swap("self.sampler.num_virtual_ranks", "self.sampler.num_ranks"),
        "with virtual ranks the gradient of uneven labels is too small",
        "unit/training/test_feed.py::test_uneven_micro_batches_weigh_by_their_labels_whatever_virtual_rank_runs_them",
    ),
    "feeds-lines-of-the-next-step": Fault(
        "keep_lines",
        Swap("until", "until + 1"),
        "metrics.jsonl has the step behind a checkpoint twice",
        "unit/training/test_result.py::test_lines_of_later_steps_and_one_that_was_cut_off_do_not_stay",
    ),
    "metrics-ignored-labels-count": Fault(
        "predictions",
        Swap("(outputs[places], labels[places])", "(outputs, labels)"),
        "padding counts as wrong predictions",
        "distributed/test_metrics.py::test_metrics_are_those_of_one_process_to_the_last_digit",
    ),
    "padded-tokens-are-likely": Fault(
        "with_whole_multiple",
        Swap("-math.inf", "0.0"),
        "tokens that do not exist take a share of the softmax",
        "unit/models/test_gpt.py::test_no_kind_of_head_has_a_gradient_that_is_further_from_the_true_one",
    ),
    "scale-of-chunks-in-16-bits": Fault(
        "_TotalByChunks.backward",
        Swap("(of_hidden.float() * factor).to(of_hidden.dtype)", "of_hidden * factor.to(of_hidden.dtype)"),
        "all gradients below the head are up to 0.4 % too long or short",
        "unit/models/test_gpt.py::test_no_kind_of_head_has_a_gradient_that_is_further_from_the_true_one",
    ),
    "resuming-takes-the-oldest": Fault(
        "newest_first",
        Swap("checkpoints_in(folder)[::-1]", "checkpoints_in(folder)"),
        "a run goes on from its oldest checkpoint, and sets the newer ones aside",
        "unit/launching/test_resuming.py::test_the_newest_is_tried_first",
    ),
    "plan-always-fits": Fault(
        "task._plan",
        Always(True, "fits"),
        "a script takes a run that does not fit for one that does",
        "unit/launching/test_task.py::test_a_run_that_does_not_fit_is_an_exit_code_of_its_own",
    ),
    "auto-takes-what-does-not-fit": Fault(
        "Choice.write",
        Always(True, "fits"),
        "a rerun takes a stage that did not fit",
        "unit/preflight/test_choice.py::test_what_does_not_fit_is_chosen_for_no_run",
    ),
    "room-for-one-rank": Fault(
        "Room.of_machine",
        Without("num_local"),
        "each rank of a machine is given all of its memory",
        "unit/preflight/test_room.py::test_the_ranks_of_a_machine_share_its_memory",
    ),
    "replay-counts-tokens-from-the-first-document": Fault(
        "TokenStore.origin",
        Without("number"),
        "a row is told at a place of its file at which it is not",
        "unit/data/test_datasets.py::test_a_token_is_told_by_the_file_that_it_was_read_from_and_its_place_there",
    ),
    "worst-is-the-largest-gradient": Fault(
        "Record.worst",
        Argument("max", "key", "lambda step: float(norms[step] or 0.0)"),
        "--worst is a step at the beginning, where gradients are large, in place of the spike",
        "unit/replay/test_record.py::test_the_largest_spike_comes_before_the_large_gradients_of_the_beginning",
    ),
}
