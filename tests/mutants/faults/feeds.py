"""In what a run is fed with, measures and keeps: data at its edges, figures, the loop itself, what is offloaded."""

from tests.mutants.fault import Fault

STORE, OF_STORE = "data/store/", "unit/data/store/"
READING, OF_READING = "data/reading/", "unit/data/reading/"
PREPARING, OF_PREPARING = "data/preparing/", "unit/data/preparing/"
TRAINING, OF_TRAINING = "training/", "unit/training/"

FAULTS = {
    "feeds-fewer-documents-than-files": Fault(
        STORE + "formats.py",
        "    if len(starts) == 0 or starts[0] != 0:\n",
        "    if len(starts) == 0:\n",
        "the tokens before the first document of an index are in no document",
        ("unit/data/test_tokens.py::test_tokens_before_the_first_document_of_an_index_are_one",),
    ),
    "feeds-last-of-the-vocabulary": Fault(
        STORE + "guess.py",
        "    if vocab_size is None or int(words.max()) < vocab_size:\n",
        "    if vocab_size is None or int(words.max()) < vocab_size - 1:\n",
        "tokens of which one is the vocabulary's last are refused as big-endian",
        ("unit/data/test_tokens.py::test_tokens_that_are_as_they_should_be_are_not_taken_for_something_else",),
    ),
    "feeds-last-place-of-the-largest": Fault(
        STORE + "scan.py",
        "high = second if second.largest > first.largest else first",
        "high = second if second.largest >= first.largest else first",
        "of an unknown token another place is told than its first",
        ("unit/data/test_tokens.py::test_of_several_unknown_tokens_the_first_is_told",),
    ),
    "feeds-window-behind-the-last": Fault(
        STORE + "windows.py",
        "wanted[(wanted < 0) | (wanted >= len(self))]",
        "wanted[(wanted < 0) | (wanted > len(self))]",
        "the row behind the last is read: tokens of the other side of the split",
        ("unit/data/store/test_windows.py::test_no_window_reaches_beyond_the_last_token",),
    ),
    "feeds-one-row-too-few": Fault(
        STORE + "split.py",
        "    min_num_rows = math.ceil(1 / smaller - 1e-9)\n",
        "    min_num_rows = math.ceil(1 / smaller - 1e-9) - 1\n",
        "a text one row too short for a validation set gives one without a row",
        ("unit/data/store/test_windows.py::test_a_text_too_short_for_one_window_on_each_side_is_refused",),
    ),
    "feeds-state-of-half-an-order": Fault(
        READING + "batches.py",
        "different = [name for name in {**theirs, **mine} if theirs.get(name) != mine.get(name)]",
        "different = [name for name in theirs if theirs.get(name) != mine.get(name)]",
        "a run goes on with data of which the saved run knew less",
        ("unit/data/reading/test_batches.py::test_a_state_that_knows_less_of_the_data_is_refused_too",),
    ),
    "feeds-generators-by-the-batch": Fault(
        READING + "fetch.py",
        '                seed_by("batch", seed, *epochs, *rows)\n',
        "",
        "a collate function that masks at random draws what the last row has left to it",
        ("unit/data/reading/test_fetch.py::test_what_collate_draws_depends_on_the_rows_of_its_batch",),
    ),
    "feeds-error-waits-for-a-value": Fault(
        READING + "loader.py",
        "                    self._error = error\n                    self._changed.notify_all()\n",
        "                    self._error = error\n",
        "a step waits for ever for a row that could not be read",
        ("unit/data/reading/test_loader.py::test_who_waits_for_a_value_is_woken_by_the_error_in_its_place",),
    ),
    "feeds-workers-outlive-the-end": Fault(
        READING + "workers.py",
        "    finally:\n        ends.close()\n",
        "    finally:\n        pass\n",
        "each loader of a run leaves its worker processes",
        ("unit/data/reading/test_loader.py::test_workers_in_the_middle_of_an_item_are_gone_in_bounded_time",),
    ),
    "feeds-lock-of-a-folder-that-went": Fault(
        PREPARING + "lock.py",
        "            if not _is_at(file, folder / LOCK_NAME):\n",
        "            if False:\n",
        "two processes prepare one text at once, where an abandoned folder was removed meanwhile",
        ("unit/data/preparing/test_lock.py",),
    ),
    "feeds-store-of-other-settings": Fault(
        PREPARING + "cache.py",
        "    if seal.recipe != recipe:\n",
        "    if seal.recipe is None:\n",
        "tokens that were made with another tokenizer are trained on",
        ("unit/data/preparing/test_cache.py::test_a_store_of_another_recipe_is_made_anew",),
    ),
    "feeds-sources-of-the-same-bytes": Fault(
        PREPARING + "cache.py",
        "    if sha256_of(sources) != seal.sources_sha256:\n",
        "    if _nbytes(sources) == -1:\n",
        "tokens of a text that was edited to the same length are trained on",
        ("unit/data/preparing/test_cache.py::test_a_store_that_does_not_fit_is_made_anew_with_a_line_that_says_why",),
    ),
    "feeds-notes-of-what-is-not-there": Fault(
        PREPARING + "writer.py",
        ".st_size >= nbytes for name, nbytes in needed.items())",
        ".st_size >= 0 for name, nbytes in needed.items())",
        "a store whose last shard was cut short goes on behind a hole of zeros",
        ("unit/data/preparing/test_writer.py::test_where_less_lies_there_than_was_noted_all_is_made_anew",),
    ),
    "feeds-next-schedule-of-all-steps": Fault(
        TRAINING + "trainer.py",
        "self.schedule(step - self.result.skipped_steps, self.max_steps)",
        "self.schedule(step, self.max_steps)",
        "a skipped step counts as an update to the schedule",
        ("unit/training/test_trainer.py::test_a_skipped_step_is_a_step_of_the_run_but_not_of_the_schedule",),
    ),
    "feeds-stopped-at-the-end": Fault(
        TRAINING + "callback.py",
        "return None if self.is_last else self.asked.stopped_by",
        "return self.asked.stopped_by",
        "a run that a signal comes to in its last step is told as stopped, without its end",
        ("unit/training/test_trainer.py::test_a_run_told_to_stop_in_its_last_step_completes",),
    ),
    "feeds-evaluated-twice": Fault(
        TRAINING + "callbacks/evaluation.py",
        "is_owed = run.is_due(self._every) and self._evaluated_at != run.step",
        "is_owed = run.is_due(self._every)",
        "a run that goes on evaluates once more what it has evaluated before it saved",
        ("unit/training/callbacks/test_checkpoints.py::test_a_run_that_goes_on_is_the_run_that_never_stopped",),
    ),
    "feeds-lines-of-the-next-step": Fault(
        TRAINING + "figures/sinks.py",
        "if _step_of(line) <= until)",
        "if _step_of(line) <= until + 1)",
        "metrics.jsonl has the step behind a checkpoint twice",
        ("unit/training/figures/test_sinks.py::test_lines_of_later_steps_and_one_that_was_cut_off_do_not_stay",),
    ),
    "feeds-wait-of-rank-0": Fault(
        TRAINING + "measuring.py",
        "return total / self._world.size, max(waits_ms)",
        "return total / self._world.size, waits_ms[0]",
        "that another rank waits for its data nobody sees",
        ("unit/training/test_measuring.py",),
    ),
    "feeds-weighs-by-ranks": Fault(
        TRAINING + "feed.py",
        "per_label, size = total.clamp(min=1), self.sampler.num_virtual_ranks",
        "per_label, size = total.clamp(min=1), self.sampler.num_ranks",
        "with virtual ranks the gradient of uneven labels is too small",
        (
            "unit/training/test_feed.py::test_uneven_micro_batches_weigh_by_their_labels_whatever_virtual_rank_runs_them",
        ),
    ),
    "feeds-clock-forgets-the-earlier": Fault(
        TRAINING + "figures/metrics.py",
        "return {name: earlier[name] + value for name",
        "return {name: value for name",
        "a run that goes on for the third time knows the speed of the second sitting alone",
        ("unit/training/figures/test_metrics.py::test_a_clock_goes_on_with_the_sums_of_one_before_it",),
    ),
    "feeds-last-checkpoint-of-the-step": Fault(
        TRAINING + "callbacks/checkpoints.py",
        "if step_of(path) > step or (step_of(path) == step and path != taken):",
        "if step_of(path) > step:",
        "a run that begins with the checkpoint of another folder cannot save where its own has one",
        (
            "unit/training/callbacks/test_checkpoints.py::test_of_its_own_folder_a_run_that_begins_with_anothers_keeps_what_comes_before",
        ),
    ),
    "feeds-signal-of-the-first-rank": Fault(
        TRAINING + "request.py",
        "signal=signal.SIGINT if number % SAVE == signal.SIGINT else 0,",
        "signal=0,",
        "a run stopped by Ctrl-C beside a scheduler's signal has the exit code of success",
        ("unit/training/test_request.py::test_the_signal_of_a_run_is_named_and_ctrl_c_counts_first",),
    ),
    "feeds-share-of-no-row": Fault(
        TRAINING + "callbacks/evaluation.py",
        "share = max(1, round(num_sequences * shares[source]))",
        "share = round(num_sequences * shares[source])",
        "a source that weighs little is divided by no row in an evaluation",
        (
            "unit/training/callbacks/test_evaluation.py::test_a_source_that_weighs_next_to_nothing_is_evaluated_by_a_row",
        ),
    ),
    "feeds-answer-drawn-in-training": Fault(
        "device/cpu.py",
        "        return torch.random.fork_rng([])\n",
        "        return nullcontext()\n",
        "how often one evaluates changes the dropout of the training",
        ("unit/device/test_cpu.py::test_random_numbers_drawn_inside_change_none_behind",),
    ),
    "feeds-gaps-side-by-side": Fault(
        "offload/disk.py",
        "nbytes + self._nbytes.pop(before + nbytes, 0)",
        "nbytes",
        "a file grows though the gap between two others that were freed would do",
        ("unit/offload/test_disk.py::test_gaps_that_touch_are_one",),
    ),
    "feeds-largest-gap": Fault(
        "offload/disk.py",
        "        start = min(fitting, key=self._nbytes.__getitem__)\n",
        "        start = max(fitting, key=self._nbytes.__getitem__)\n",
        "small places use up the large gap that the next large one needs",
        ("unit/offload/test_disk.py::test_the_smallest_gap_that_fits_is_used_and_its_rest_stays",),
    ),
    "feeds-group-above-not-asked": Fault(
        "offload/memory.py",
        "(group, *group.parents)[: len(group.relative_to(top).parts) + 1]",
        "(group, *group.parents)[: len(group.relative_to(top).parts)]",
        "the limit of a container's outermost group is not known, and a run in it is killed",
        ("unit/offload/test_available_memory.py::test_a_limit_of_the_group_or_of_one_around_it_counts",),
    ),
    "feeds-settles-the-first": Fault(
        "offload/windows.py",
        "        for _, last in self._resting:\n            last.settle()\n",
        "        for _, last in self._resting[:1]:\n            last.settle()\n",
        "between steps the host reads places that are still written to",
        (
            "unit/offload/test_windows.py::test_the_oldest_is_used_again_once_there_are_enough_and_its_last_copy_is_waited_for",
        ),
    ),
}
