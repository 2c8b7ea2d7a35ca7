"""In plans of runs."""

from tests.mutants.fault import Fault

OF_VERB, OF_COMMAND = ("unit/commands/test_plan.py",), ("unit/launching/command/test_planned.py",)
OF_REHEARSAL = ("unit/planning/test_rehearsal.py",)
OF_REPEATED = ("unit/planning/test_repeated.py",)
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
    "plan-off-the-line": Fault(
        "planning/repeated.py",
        "if off > 2 * slack:",
        "if False:",
        "a few blocks tell of all of them though each adds something else",
        OF_REPEATED,
    ),
    "plan-blocks-by-place": Fault(
        "planning/repeated.py",
        "if abs(expected - whole) >",
        "if False and abs(expected - whole) >",
        "a block that does more at its place is planned as the others",
        OF_REPEATED,
    ),
    "plan-tied-blocks": Fault(
        "planning/repeated.py",
        "return len(ours) == len(inside) == len(everywhere)",
        "return True",
        "parameters that blocks share are counted for each",
        OF_REPEATED,
    ),
    "plan-blocks-that-come-to-share": Fault(
        "planning/repeated.py",
        "return spans and 2 * min(numels) > most_shared",
        "return spans",
        "blocks that share a bucket in the whole model are planned as if each had its own",
        OF_REPEATED,
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
        "    if unknown := next((each.unknown_because for each in plans.values()), None):\n",
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
        "key=lambda each: (not each.fits, each.taken if not each.fits else each.seconds)",
        "key=lambda each: each.seconds",
        "the fastest way is chosen, also where it does not fit",
        OF_WAYS,
    ),
    "auto-skips-ways-at-any-stage": Fault(
        "planning/choice.py",
        "if any(each.fits_best and ",
        "if any(each.fits and ",
        "a way that fits at a better stage is not planned, since a faster one fits at a worse",
        OF_WAYS,
    ),
    "auto-moves-what-forwards-save-for-nothing": Fault(
        "planning/rehearsal.py",
        "            moved.append((more[0] * leaves * accumulated // num, more[1] * leaves * accumulated // num))\n",
        "",
        "to offload activations costs no time by the model",
        ("unit/planning/test_ways.py",),
    ),
    "auto-updates-what-forwards-save": Fault(
        "planning/cost.py",
        " - plan.saved",
        "",
        "activations that are offloaded are taken for state of the optimizer",
        ("unit/planning/test_ways.py",),
    ),
    "auto-forgets-the-disk": Fault(
        "planning/cost.py",
        "rates.disk if plan.disk else rates.host",
        "rates.host",
        "a slow disk is taken for memory",
        OF_WAYS,
    ),
    "auto-counts-one-micro-batch": Fault(
        "planning/rehearsal.py",
        "mode.flops * leaves * accumulated // num",
        "mode.flops",
        "the compute of further micro-batches is forgotten",
        OF_WAYS,
    ),
    "auto-measures-no-link": Fault(
        "run/probe.py",
        'assumed=assumed if is_one_host else ("link", *assumed)',
        "assumed=assumed",
        "a rate that nobody has measured is told as one that was",
        OF_WAYS,
    ),
}
