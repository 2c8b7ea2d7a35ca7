"""In how often something is done, what a run says of its speed, and where its samples begin and end."""

from tests.mutants.fault import Fault

STEPS = "run/rhythms.py"
OF_STEPS = ("unit/run/test_rhythms.py",)
SAMPLE = "training/callbacks/sample.py"
OF_SAMPLE = ("unit/training/callbacks/test_sample.py",)

FAULTS = {
    "rhythms-never": Fault(
        STEPS,
        "max(1, round(num_sequences / batch_size_of(config, num_ranks)))",
        "round(num_sequences / batch_size_of(config, num_ranks))",
        "a rhythm of less than a step is none: nothing is ever evaluated",
        OF_STEPS,
    ),
    "rhythms-of-one-rank": Fault(
        STEPS,
        "(train.virtual_ranks or num_ranks) * train.gradient_accumulation_steps",
        "(train.virtual_ranks or 1) * train.gradient_accumulation_steps",
        "with four ranks, an epoch is evaluated a quarter as often as was asked for",
        OF_STEPS,
    ),
    "rhythms-hours-of-minutes": Fault(
        "config/rules.py",
        '"h": ("seconds", 3600)',
        '"h": ("seconds", 60)',
        "a run saves each two minutes that was to save each two hours",
        ("unit/config/test_rules.py",),
    ),
    "rhythms-words-without-values": Fault(
        "config/suggest.py",
        '(f"{last}={value}", ".".join(parts[-2:]), last)',
        '(".".join(parts[-2:]), last)',
        "strategy=fsdp is answered with the name of a setting alone",
        ("unit/config/test_suggest.py",),
    ),
    "rhythms-sample-goes-on": Fault(
        SAMPLE,
        "                stop_token=stop_token,\n",
        "",
        "a sample goes on behind the end of its text",
        OF_SAMPLE,
    ),
    "rhythms-prompt-unknown": Fault(
        SAMPLE,
        "int(ids.max()) >= vocab_size",
        "int(ids.max()) > vocab_size",
        "a prompt with a token that the model does not know ends the run at its sample",
        OF_SAMPLE,
    ),
    "rhythms-padding-is-learnt": Fault(
        "training/trainer.py",
        "num_labels, num_tokens = read_counts()",
        "num_tokens, num_labels = read_counts()",
        "labels that count are told as tokens that were read",
        ("unit/training/test_feed.py",),
    ),
    "rhythms-half-link-stays": Fault(
        "training/best.py",
        "            remove_half_links(self._folder)\n",
        "            pass\n",
        "each run that is killed while it names its best checkpoint leaves a link for ever",
        ("unit/training/test_best.py",),
    ),
}
