"""Around the user's optimizer: what is probed of it, what is compared of its groups, what torch's schedulers see."""

from tests.mutants.fault import Fault

PROBE, AGREEMENT = "engine/groups/probe.py", "engine/agreement.py"
LENT, OF_LENT = "engine/buckets/update.py", ("unit/engine/buckets/test_lent.py",)
OF_PROBE = ("unit/engine/groups/test_probe.py",)
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
        PROBE,
        "[[piece] for piece in torch.cat([tensor.flatten() for tensor in tensors]).tensor_split(BORDERS)]",
        "_apart(tensors)",
        "an optimizer that takes norms of tensors gets pieces of them",
        OF_PROBE,
    ),
    "tensors-not-tried-apart": Fault(
        PROBE,
        "return IN_PARTS if not is_whole and runs.give(plain, _apart) else EVERYTHING",
        "return IN_PARTS",
        "an optimizer that clips over all tensors is told to declare itself, and clips each rank's",
        OF_PROBE,
    ),
    "probed-at-the-rate-given": Fault(
        PROBE,
        'settings = {**settings, "lr": rate * 0 + RATE} if is_number(rate) else settings',
        "settings = dict(settings)",
        "a rate of 0 before a warm-up hides that an optimizer takes norms",
        OF_PROBE,
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
        PROBE,
        "renewed = runs.run(_as_one, is_renewed=True)",
        "renewed = runs.run(_as_one)",
        "state outside of self.state is lost with a change of stage",
        OF_PROBE,
    ),
    "averages-elsewhere-overlooked": Fault(
        PROBE,
        'if is_same and not any("tensor(" in attributes[name] for name in lost):',
        "if is_same:",
        "an average of weights begins anew with a change of stage",
        OF_PROBE,
    ),
    "nested-state-overlooked": Fault(
        PROBE,
        """                yield f"{name!r}, a {type(value).__name__}"\n""",
        "                pass\n",
        "a dict of tensors in an optimizer's state is given to shards whole",
        OF_PROBE,
    ),
    "numbers-of-groups-lost": Fault(
        "engine/step.py",
        "            self._held.groups.count_step()\n",
        "            pass\n",
        "an optimizer that counts its steps in its group begins anew in each",
        OF_PROBE,
    ),
    "numbers-of-groups-shared": Fault(
        "engine/groups/hyperparameters.py",
        "    group.update({name: deepcopy(settings[name]) for name in own if name in settings})\n",
        "",
        "a count of steps in a tensor is counted by each bucket",
        OF_PROBE,
    ),
    "state-of-another-shape-taken": Fault(
        PROBE,
        "if value.ndim > 0 and not is_whole and value.shape != tensor.shape:",
        "if False:",
        "state that no rank can cut is refused in the first save",
        OF_PROBE,
    ),
    "hooks-of-torchs-own-not-tried": Fault(
        "engine/groups/optimizer_factory.py",
        "return is_torchs and not any(hooks)",
        "return is_torchs",
        "a hook that clips over all tensors clips each rank's",
        OF_PROBE,
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
