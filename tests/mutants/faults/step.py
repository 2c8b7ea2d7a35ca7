"""In the engine's calls: what is added up, given up, clipped, skipped and compared."""

from tests.mutants.fault import Fault

ENGINE, AGREEMENT, STEP = "engine/step.py", "engine/agreement.py", "engine/update/optimizer_step.py"
OF_ENGINE = ("unit/engine/test_engine.py", "unit/engine/test_engine_between_steps.py")
AHEAD = "engine/update/ahead.py"
OF_SKIPS = (
    "streams/test_training.py::test_a_step_that_is_skipped_on_a_gpu_changes_nothing",
    "streams/test_training.py::test_a_gpu_skips_as_a_cpu_does",
)
OF_CROSSING = (
    "streams/test_training.py::test_the_host_updates_a_bucket_while_the_gradient_of_the_next_is_on_its_way",
    "streams/test_training.py::test_an_update_on_the_host_that_fails_leaves_no_copy_under_way_and_no_loan",
)
OF_STREAMS = ("streams/test_training.py::test_the_code_of_a_gpu_comes_to_the_bits_of_a_cpu",)
OF_UPDATE_ALL = ("unit/engine/update/test_optimizer_step.py",)

FAULTS = {
    "ahead-trusts-every-class": Fault(
        AHEAD,
        "and is_torchs_own(optimizer)",
        "and True",
        "an optimizer that inherits from a fused one updates with a gradient that is not finite",
        OF_SKIPS,
    ),
    "ahead-skipped-step-updates": Fault(
        AHEAD,
        "is_off = is_finite.logical_not()",
        "is_off = is_finite.logical_not().logical_and(norm.isfinite())",
        "a GPU updates with a gradient that is not finite",
        OF_SKIPS,
    ),
    "ahead-factor-of-a-skipped-step": Fault(
        AHEAD,
        "factor = torch.where(is_finite, factor, 1.0)\n",
        "factor = factor.clone()\n",
        "on a GPU a gradient whose norm only fp32 cannot hold is lost before it is squared in fp64",
        OF_SKIPS,
    ),
    "ahead-gradient-kept": Fault(
        AHEAD, "            bucket.gradient.drop()\n", "            pass\n", "the next step begins with it", OF_SKIPS
    ),
    "ahead-weights-not-told": Fault(
        AHEAD,
        "            bucket.update.changed()\n",
        "            pass\n",
        "other ranks' parts stay as they were",
        OF_STREAMS,
    ),
    "ahead-state-stays": Fault(
        AHEAD,
        "            optimizer.state.pop(target, None)\n",
        "            pass\n",
        "a skipped first step leaves momentum that nobody has set",
        OF_SKIPS,
    ),
    "ahead-numbers-read-before-they-come": Fault(
        "device/reading.py",
        "        arrived.settle()\n",
        "",
        "the host reads the norm of an earlier step",
        ("streams/test_training.py::test_all_that_is_done_to_the_same_bytes_is_ordered",),
    ),
    "settings-not-compared": Fault(
        AGREEMENT,
        "    if not different:\n        return\n",
        "    return\n",
        "ranks with other settings train on",
        ("unit/engine/test_build.py::test_ranks_that_are_given_different_things_are_all_told_so",),
    ),
    "writes-not-compared": Fault(
        AGREEMENT,
        "self._collectives.order, self.written]",
        "self._collectives.order, 0]",
        "a weight that one rank alone has written is trained on",
        ("unit/engine/test_weight_habits.py", "unit/engine/test_ranks_that_differ.py"),
    ),
    "backwards-not-compared": Fault(
        AGREEMENT,
        "numbers = [self.num_steps + 1, self.num_backwards,",
        "numbers = [self.num_steps + 1, 0,",
        "a rank that has left out a micro-batch trains on",
        (*OF_ENGINE, "unit/engine/test_agreement.py"),
    ),
    "steps-not-compared": Fault(
        AGREEMENT,
        "numbers = [self.num_steps + 1,",
        "numbers = [0,",
        "a rank that has loaded another step trains on",
        (*OF_ENGINE, "unit/engine/test_agreement.py"),
    ),
    "clipped-by-the-local-norm": Fault(
        AGREEMENT,
        "sums = add_digit_sums(digits)",
        "sums = digit_sums",
        "each rank clips by the norm of its own part",
        OF_ENGINE,
    ),
    "order-not-compared": Fault(
        AGREEMENT,
        "self._collectives.order, self.written]",
        "0, self.written]",
        "ranks whose collectives came in another order go on",
        (*OF_ENGINE, "unit/engine/test_agreement.py"),
    ),
    "stamps-not-compared": Fault(
        AGREEMENT,
        'torch.where((stamps == stamps[0]).all(), norm_of_digit_sums(sums), float("nan"))',
        'torch.where(torch.tensor(True), norm_of_digit_sums(sums), float("nan"))',
        "ranks that have not done the same train on",
        OF_ENGINE,
    ),
    "loss-scale-stays": Fault(
        STEP,
        "coefficient / loss_scale if is_scaled else None",
        "coefficient if is_scaled else None",
        "gradients are too large by the loss scale",
        OF_ENGINE,
    ),
    "loss-scale-stays-without-clipping": Fault(
        STEP,
        "self.max_grad_norm is not None or self._loss_scaler is not None",
        "self.max_grad_norm is not None",
        "without clipping gradients are too large by the loss scale",
        OF_ENGINE,
    ),
    "overflow-not-skipped": Fault(
        STEP,
        "skipped = not math.isfinite(told.norm)",
        "skipped = math.isinf(told.norm)",
        "weights become NaN",
        OF_ENGINE,
    ),
    "skipped-gradient-stays": Fault(
        STEP, "            schedule.drop_gradients()\n", "            pass\n", "it is added to the next", OF_ENGINE
    ),
    "unfinished-reductions": Fault(
        STEP, "        schedule.reductions.finish()\n", "", "the norm is taken of what has not arrived", OF_ENGINE
    ),
    "gradient-kept-behind-the-update": Fault(
        "engine/update/optimizer_step.py",
        "        bucket.gradient.drop()\n",
        "        pass\n",
        "the next step begins with this one's gradient",
        OF_ENGINE,
    ),
    "updated-not-prepared-for": Fault(
        "engine/update/optimizer_step.py",
        "    gathers.prepare_updated(trained)\n",
        "",
        "the gathers behind an update find no receives posted, and take twice the time on a link",
        OF_UPDATE_ALL,
    ),
    "update-given-up-half-way": Fault(
        "engine/update/optimizer_step.py",
        "        while under_way:\n            _advance(under_way)\n",
        "        _advance(under_way)\n",
        "whole tensors that are still travelling are not unloaded",
        OF_UPDATE_ALL,
    ),
    "failed-update-leaves-the-next-on-its-way": Fault(
        "engine/update/optimizer_step.py",
        "            update.close()\n",
        "            pass\n",
        "where an update fails, the buffer of the next bucket's gradient is never given back",
        OF_CROSSING,
    ),
    "failed-update-on-the-host-keeps-its-loan": Fault(
        "engine/buckets/update.py",
        "            on_host()\n            if lent is not None:\n                self._pool.give_back(lent)\n",
        "            on_host()\n",
        "each step on the host holds more",
        OF_CROSSING,
    ),
    "host-updates-before-the-next-gradient-comes": Fault(
        "engine/buckets/update.py",
        "        try:\n            yield\n            with self._at_hand():",
        "        try:\n            with self._at_hand():",
        "the host waits for each gradient, and the GPU for each update",
        OF_CROSSING,
    ),
    "losses-of-a-given-up-step": Fault(
        ENGINE,
        "        self._held.ledger.drop_step()\n        self._losses.clear()\n",
        "        self._held.ledger.drop_step()\n",
        "a loss of a step that was given up is blamed for the next",
        OF_ENGINE,
    ),
    "given-up-step-counted": Fault(
        ENGINE,
        "        self._held.ledger.drop_step()\n",
        "",
        "the next step shows the traffic of one that was given up",
        OF_ENGINE,
    ),
    "no-sync-for-ever": Fault(
        ENGINE,
        "        try:\n            yield\n        finally:\n            self._syncs = before\n",
        "        yield\n        self._syncs = before\n",
        "after an exception nothing is ever reduced",
        OF_ENGINE,
    ),
    "step-counted-outside": Fault(
        ENGINE,
        "self._held.ledger.in_step = backward_follows or in_step",
        "self._held.ledger.in_step = backward_follows",
        "behind an evaluation the rest of a step counts as outside",
        OF_ENGINE,
    ),
    "evaluation-keeps-weights": Fault(
        ENGINE,
        "self._held.schedule.end_forward(backward_follows=backward_follows and returned)",
        "self._held.schedule.end_forward(backward_follows=True)",
        "an evaluation at stage 3 leaves weights gathered",
        OF_ENGINE,
    ),
    "failed-backward-not-forgotten": Fault(
        ENGINE,
        "                    self.zero_grad()\n",
        "                    pass\n",
        "half a gradient is left for whoever goes on",
        OF_ENGINE,
    ),
    "old-losses-allowed": Fault(
        ENGINE,
        "            self._held.weights_changed()\n",
        "            pass\n",
        "a backward runs through activations of weights that were updated",
        OF_ENGINE,
    ),
    "loss-divided-by-ranks": Fault(
        ENGINE,
        "_times(loss, weight * self.loss_scale)",
        "_times(loss, weight * self.loss_scale / self._held.world.size)",
        "what a rank computes is divided by the number of ranks twice",
        OF_ENGINE,
    ),
    "scale-never-lowered": Fault(
        ENGINE,
        "            self.loss_scaler.update(overflowed=result.skipped)\n",
        "            self.loss_scaler.update(overflowed=False)\n",
        "an overflow does not lower the loss scale",
        OF_ENGINE,
    ),
    "loss-summed-over-virtual-ranks": Fault(
        ENGINE,
        "self._loss = total / len(self.virtual_ranks)",
        "self._loss = total",
        "a step shows a loss that is too large by the number of virtual ranks",
        ("unit/engine/test_losses.py",),
    ),
    "phase-not-put-back": Fault(
        ENGINE,
        "            self._held.schedule.phase = self.stamps.phase = before\n",
        "            pass\n",
        "weights at rest may be read between the steps, and where a rank is is told wrong",
        OF_ENGINE,
    ),
}
