"""Faults of training, planning and replay."""

from tests.mutants.changes import Swap
from tests.mutants.fault import Fault

FAULTS = {
    "feeds-next-schedule-of-all-steps": Fault(
        "Trainer._train",
        Swap("step - self.result.skipped_steps", "step"),
        "a skipped step counts as an update to the schedule",
        "unit/training/test_trainer.py::test_a_skipped_step_is_a_step_of_the_run_but_not_of_the_schedule",
    ),
    "feeds-weighs-by-ranks": Fault(
        "TrainingFeed._parts_of",
        Swap("self.sampler.num_virtual_ranks", "self.sampler.num_ranks"),
        "with virtual ranks the gradient of uneven labels is too small",
        "unit/training/test_feed.py::test_uneven_micro_batches_weigh_by_their_labels_whatever_virtual_rank_runs_them",
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
    "room-for-one-rank": Fault(
        "Room.of_machine",
        Swap("available_nbytes() / num_local", "available_nbytes()"),
        "each rank of a machine is given all of its memory",
        "unit/preflight/test_room.py::test_the_ranks_of_a_machine_share_its_memory",
    ),
}
