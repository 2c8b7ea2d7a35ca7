"""Around the user's optimizer: what is tried of it, what is compared of its groups, what torch's schedulers see."""

from tests.mutants.fault import Fault

TRIAL, AGREEMENT = "engine/groups/trial.py", "engine/agreement.py"
OF_TRIAL = ("unit/engine/groups/test_trial.py",)
OF_HABITS = ("unit/engine/test_optimizer_habits.py",)

FAULTS = {
    "hyperparameters-not-compared": Fault(
        AGREEMENT,
        "hyperparameters = _hash(told, num_bytes=6)",
        "hyperparameters = 0",
        "a rank trains on with another weight decay",
        OF_HABITS,
    ),
    "pieces-not-tried": Fault(
        TRIAL,
        "[[piece] for piece in _flat(tensors)[0].tensor_split(BORDERS)]",
        "_apart(tensors)",
        "an optimizer that takes norms of tensors gets pieces of them",
        OF_TRIAL,
    ),
    "tensors-not-tried-apart": Fault(
        TRIAL,
        "        if self._gives(plain, chosen, _apart):\n",
        "        if plain is not None:\n",
        "an optimizer that clips over all tensors is told to declare itself, and clips each rank's",
        OF_TRIAL,
    ),
    "trial-at-the-rate-given": Fault(
        TRIAL,
        "return RATE if isinstance(value, int | float) else value",
        "return value",
        "a rate of 0 before a warm-up hides that an optimizer takes norms",
        OF_TRIAL,
    ),
    "forgetting-ends-forwards": Fault(
        "engine/schedule/schedule.py",
        "        self.gathers.free()\n",
        "        self.gathers.rest()\n",
        "at stage 3 a backward behind zero_grad finds its weights freed",
        OF_HABITS,
    ),
    "first-rate-stored": Fault(
        "engine/groups/hyperparameters.py",
        '        self.first_lr = float(self.get("lr") or 0.0)\n',
        '        self.first_lr = self["initial_lr"] = float(self.get("lr") or 0.0)\n',
        "a scheduler begins with the rate of the build, whatever was set since",
        OF_HABITS,
    ),
}
