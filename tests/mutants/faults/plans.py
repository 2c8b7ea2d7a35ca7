"""In plans of runs."""

from tests.mutants.fault import Fault

OF_VERB, OF_COMMAND = ("unit/commands/test_plan.py",), ("unit/launching/command/test_planned.py",)
OF_REHEARSAL = ("unit/planning/test_rehearsal.py",)
OF_WAYS = ("unit/planning/test_ways.py",)
OF_CHOICE, OF_AUTO = ("unit/planning/test_choice.py",), ("unit/planning/test_auto.py",)

FAULTS = {
    "plan-without-masters": Fault(
        "sharding/by_size.py",
        "STATE_PER_PARAMETER[optimizer] + master",
        "STATE_PER_PARAMETER[optimizer]",
        "the fp32 master weights of 16 bits are left out",
        OF_VERB,
    ),
    "plan-always-fits": Fault(
        "launching/command/planned.py",
        "exits.COMPLETED if plan.fits else exits.DOES_NOT_FIT",
        "exits.COMPLETED",
        "a script takes a run that does not fit for one that does",
        OF_COMMAND,
    ),
    "plan-without-average": Fault(
        "planning/rehearsal.py",
        "            engine.keep_average()\n",
        "            pass\n",
        "the average of the weights is not planned",
        OF_REHEARSAL,
    ),
    "plan-stays-in-a-rank": Fault(
        "device/processes.py",
        "if not may_fork(idle=_STORE):",
        "if not may_fork():",
        "a rank that keeps the store plans in itself, and holds what plans leave behind",
        OF_COMMAND,
    ),
    "plan-counts-libraries": Fault(
        "device/cpu.py",
        "return most_nbytes() - files_nbytes()",
        "return most_nbytes()",
        "the peak of a rank is measured with libraries, and a chosen stage changed though all fits",
        ("unit/device/test_cpu.py",),
    ),
    "plan-norm-of-a-gpu": Fault(
        "planning/rehearsal.py",
        "rehearsing(on_host=links.on_host)",
        "rehearsing(on_host=False)",
        "the norm of a CPU is planned as that of a GPU, which keeps less",
        OF_REHEARSAL,
    ),
    "plan-one-step-of-offload": Fault(
        "planning/rehearsal.py",
        "            if self._homes.tiers:  # whose windows are as large as they become from the second step on\n"
        "                engine.train_step(rows)\n",
        "",
        "windows of what is offloaded are planned smaller than they become",
        OF_REHEARSAL,
    ),
    "plan-forgets-freed": Fault(
        "planning/live.py",
        "            self._resized(storage)\n",
        "",
        "memory that is given back under the same tensor is planned as held",
        OF_REHEARSAL,
    ),
    "plan-experts-unknown": Fault(
        "planning/unreal.py",
        "_grouped(args, kwargs) if func is _GROUPED else func(*args, **kwargs)",
        "func(*args, **kwargs)",
        "the activations of a mixture of experts are unknown",
        OF_REHEARSAL,
    ),
    "auto-lowest-stage": Fault(
        "planning/choice.py",
        "plan.sent or 0, num_ranks > 1 and not STAGES[stage].shards_optimizer, stage",
        "plan.sent or 0, False, stage",
        "a stage is chosen at which each rank updates all",
        OF_CHOICE,
    ),
    "auto-takes-what-does-not-fit": Fault(
        "planning/choice.py",
        "CHOSEN: self.values if self.plan.fits else None",
        "CHOSEN: self.values",
        "a rerun takes a stage that did not fit",
        OF_CHOICE,
    ),
    "auto-of-other-settings": Fault(
        "planning/choice.py",
        "said.get(ASKED) != asked_hash(config) or ",
        "",
        "a run takes the stage that was chosen for another model",
        OF_CHOICE,
    ),
    "auto-of-other-ranks": Fault(
        "planning/choice.py",
        ' or num_ranks not in (None, said["num_ranks"])',
        "",
        "a run takes the stage that was chosen for more ranks",
        OF_CHOICE,
    ),
    "auto-true-is-1": Fault(
        "planning/choice.py",
        "type(each) is type(said) and each == said",
        "each == said",
        "a file may say a stage that is none",
        OF_CHOICE,
    ),
    "auto-unknown-fits": Fault(
        "planning/choice.py",
        "    if unknown := next((plan.unknown_because for plan in plans.values()), None):\n",
        "    if unknown := None:\n",
        "a stage is chosen though nobody knows the activations",
        OF_CHOICE,
    ),
    "auto-forgets-the-batch": Fault(
        "planning/auto.py",
        '("micro_batch_size", ',
        "(",
        "a run takes the stage that was chosen for a smaller batch",
        OF_AUTO,
    ),
    "auto-changes-what-was-asked": Fault(
        "planning/auto.py",
        "replace(held, **{field: value})",
        "(setattr(held, field, value), held)[1]",
        "the config that asked for auto is lost, and with it the choice of a rerun",
        OF_AUTO,
    ),
    "auto-other-global-batch": Fault(
        "planning/auto.py",
        "_rows_of_a_step(config) // size",
        "config.train.gradient_accumulation_steps // size",
        "a micro-batch that is chosen twice shrinks the global batch",
        OF_WAYS,
    ),
    "auto-takes-a-way-that-does-not-fit": Fault(
        "planning/choice.py",
        "        if tried[-1].fitting:\n            break\n",
        "        break\n",
        "the first way is chosen, also where it does not fit",
        OF_WAYS,
    ),
    "auto-moves-what-forwards-save-for-nothing": Fault(
        "planning/rehearsal.py",
        "            moved.append((more[0] * leaves * accumulated // num, more[1] * leaves * accumulated // num))\n",
        "",
        "bytes that activations move are not planned",
        ("unit/planning/test_ways.py",),
    ),
}
