"""Around the user's optimizer: what is tried of it, what is compared of its groups, what torch's schedulers see."""

from tests.mutants.fault import Fault

TRIAL, AGREEMENT = "engine/groups/trial.py", "engine/agreement.py"
LENT, OF_LENT = "engine/buckets/update.py", ("unit/engine/buckets/test_lent.py",)
OF_ANEW = ("unit/engine/groups/test_made_anew.py",)
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
        "        if self._gives(rows, chosen, _apart):\n",
        "        if rows is not None:\n",
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
    "assigned-weights-forgotten": Fault(
        LENT,
        "        memory.copy_(new)\n",
        "        pass\n",
        "an optimizer that assigns p.data trains nothing",
        OF_LENT,
    ),
    "memory-of-a-weight-taken-away": Fault(
        LENT,
        "        target.data = memory\n",
        "        pass\n",
        "after a step that assigns p.data the optimizer's weights are others than the engine's",
        OF_LENT,
    ),
    "old-weight-overwritten": Fault(
        LENT,
        "        _keep_apart(optimizer, target, memory)\n",
        "        pass\n",
        "an optimizer that keeps the weight it replaces finds the new one there",
        OF_LENT,
    ),
    "kept-gradient-overwritten": Fault(
        LENT,
        "            _keep_apart(optimizer, target, gradient)\n",
        "            pass\n",
        "an optimizer that keeps its gradient finds another there in the next step",
        OF_LENT,
    ),
    "overlapping-weights-copied": Fault(
        LENT,
        "became.append(new.clone() if is_part else new)",
        "became.append(new)",
        "a weight that is transposed where it lies is read half written",
        OF_LENT,
    ),
    "not-tried-anew": Fault(
        TRIAL,
        "anew_after=STEPS_BEFORE_ANEW)",
        "anew_after=None)",
        "state outside of self.state is lost with a change of stage",
        OF_ANEW,
    ),
    "averages-elsewhere-overlooked": Fault(
        TRIAL,
        " and not differing(tensors_alone(before), tensors_alone(after)):",
        ":",
        "an average of weights begins anew with a change of stage",
        OF_ANEW,
    ),
    "nested-state-overlooked": Fault(
        "engine/groups/made_anew.py",
        '            found.append(f"self.state[parameter][{name!r}]")\n',
        "            pass\n",
        "a dict of tensors in an optimizer's state is given to shards whole",
        OF_ANEW,
    ),
    "numbers-of-groups-lost": Fault(
        "engine/groups/own_numbers.py",
        "                optimizer.state[target][OF_GROUP + name] = value\n",
        "                pass\n",
        "an optimizer that counts its steps in its group begins anew in each",
        OF_ANEW,
    ),
    "hooks-of-torchs-own-not-tried": Fault(
        TRIAL,
        "return is_torchs and not any(hooks)",
        "return is_torchs",
        "a hook that clips over all tensors clips each rank's",
        OF_ANEW,
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
