"""In how a run is judged before it starts and told of when it ends: causes, exit codes, limits, what is left behind."""

from tests.mutants.fault import Fault

FAILURES = "launching/end/failures.py"
OF_FAILURES = ("unit/launching/end/test_failures.py",)
PRESENCE = "launching/end/presence.py"
OF_PRESENCE = ("unit/launching/end/test_presence.py",)
RESTARTS = "launching/job/restarts.py"
OF_RESTARTS = ("unit/launching/job/test_restarts.py",)
CALLBACKS = "unit/training/callbacks/"

FAULTS = {
    "ends-of-whom-some-heard": Fault(
        FAILURES,
        "if all(rank in failure.unheard for failure in with_it)]",
        "if any(rank in failure.unheard for failure in with_it)]",
        "of three ranks one is blamed that answered another",
        ("unit/launching/end/test_failures.py::test_a_rank_that_one_has_heard_and_another_missed_is_not_named",),
    ),
    "ends-cut-off-host-flips-the-ending": Fault(
        FAILURES,
        "with_it = [each for each in waited if hosts.get(each.rank) == own or first.rank not in each.unheard]",
        "with_it = waited",
        "the host that was cut off writes over the ending of the others",
        ("unit/launching/end/test_failures.py::test_a_host_that_does_not_answer_is_named_and_the_first_ending_stays",),
    ),
    "ends-all-others-gone": Fault(
        FAILURES,
        " - {own}) > 1:",
        " - {own}) > 9:",
        "of three hosts the one that is cut off blames another",
        ("unit/launching/end/test_failures.py::test_a_host_that_does_not_answer_is_named_and_the_first_ending_stays",),
    ),
    "ends-one-rank-is-a-host": Fault(
        FAILURES,
        "if len(beside) > 1 and gone.issuperset(beside):",
        "if len(beside) > 1:",
        "a host is told as gone where one of its ranks is",
        ("unit/launching/end/test_failures.py::test_a_host_that_is_gone_with_all_its_ranks_is_told_as_one",),
    ),
    "ends-clock-turned-round": Fault(
        FAILURES,
        "time_s = self.time_s + clock_error(",
        "time_s = self.time_s - clock_error(",
        "a machine whose clock is late tells of its own consequence as the first cause",
        ("unit/launching/end/test_failures.py::test_the_clock_of_a_machine_does_not_decide_what_came_first",),
    ),
    "ends-outlived-by-its-cause": Fault(
        FAILURES,
        "if rank not in told_to_stop | outlived],",
        "if rank not in told_to_stop],",
        "a rank that was there when another missed a third is blamed for it",
        (
            "unit/launching/end/test_failures.py::test_a_rank_that_another_saw_alive_when_it_failed_was_ended_because_of_that",
        ),
    ),
    "ends-said-by-who-stopped": Fault(
        FAILURES,
        "state for state, _ in states if state.stopped_by and not state.in_order}",
        "state for state, _ in states if state.stopped_by}",
        "a rank that ends in order is told as one that a signal to it alone has stopped",
        ("unit/launching/end/test_failures.py::test_a_rank_that_waits_in_vain_while_all_stop_in_order_is_told_of",),
    ),
    "ends-cause-too-long": Fault(
        PRESENCE,
        "failed=_short(cause))",
        "failed=cause)",
        "of a rank on a full disk a long cause is cut off in mid-JSON, and nobody can read it",
        OF_PRESENCE,
    ),
    "ends-second-stop-counts": Fault(
        PRESENCE,
        "        if self._state.stopped_by is None:\n            name, now_s",
        "        if True:\n            name, now_s",
        "a rank that was stopped by SIGUSR1 tells of the SIGTERM that came behind it",
        (
            "unit/launching/end/test_failures.py::test_a_stop_is_in_order_while_all_ranks_are_there_and_until_a_second_one",
        ),
    ),
    "ends-one-restart-more": Fault(
        RESTARTS,
        "        if self.job.restarts >= allowed:\n",
        "        if self.job.restarts > allowed:\n",
        "a run is started again once more than it may be",
        ("unit/launching/job/test_restarts.py::test_progress_between_them_allows_more_up_to_the_number_that_was_set",),
    ),
    "ends-newest-of-the-start": Fault(
        RESTARTS,
        "        self._newest = newest\n        if not allowed",
        "        if not allowed",
        "a run that fails at the same place each time is started again for ever, once it has saved",
        ("unit/launching/job/test_restarts.py::test_progress_once_is_none_of_the_restarts_behind_it",),
    ),
    "ends-leaves-temporary-files": Fault(
        "launching/job/job.py",
        "names = (RESULT_NAME, METRICS_NAME, STEPS_NAME, CONFIG_NAME)",
        "names = (METRICS_NAME, STEPS_NAME, CONFIG_NAME)",
        "the half result.json of a killed rank stays in the folder for good",
        (
            "unit/launching/job/test_job.py::test_what_a_killed_rank_was_about_to_write_goes_when_the_run_is_started_again",
        ),
    ),
    "ends-stopped-and-failed": Fault(
        "launching/job/job.py",
        '{"status": status, "error": error, "stopped_by": None, "exit_code": code}',
        '{"status": status, "error": error, "exit_code": code}',
        "a run of which a rank died while it stopped has failed, and ends with exit code 0",
        ("unit/launching/job/test_job.py::test_an_ending_keeps_what_rank_0_had_written",),
    ),
    "ends-threads-behind-the-most": Fault(
        "launching/job/resuming.py",
        "and type(saved) is int and 0 < saved <= MAX_THREADS:",
        "and type(saved) is int and saved <= MAX_THREADS:",
        "a checkpoint whose config says 0 threads is gone on with by none",
        ("unit/launching/job/test_resuming.py::test_a_number_of_threads_that_no_run_had_is_not_taken",),
    ),
    "ends-longer-by-no-step": Fault(
        "launching/job/earlier.py",
        "max_steps is None or max_steps > steps  #",
        "max_steps is None or max_steps >= steps  #",
        "the result of a completed run is replaced by that of a run of no step",
        ("unit/launching/job/test_earlier.py::test_a_completed_run_of_other_settings_is_not_taken_for_this_one",),
    ),
    "ends-note-of-two": Fault(
        "files/lock.py",
        "    os.ftruncate(file.fileno(), 0)\n",
        "",
        "who holds a lock is not told where the one before had more to say",
        ("unit/files/test_lock.py::test_a_note_replaces_the_last_and_is_read_by_its_kind",),
    ),
    "ends-limit-is-too-much": Fault(
        "files/untrusted.py",
        "            is_larger = len(content) > max_nbytes\n",
        "            is_larger = len(content) >= max_nbytes\n",
        "a file that is as large as it may be is refused",
        ("unit/files/test_untrusted.py::test_a_file_is_read_up_to_its_limit_and_not_beyond",),
    ),
    "ends-search-in-another-order": Fault(
        "files/kept_out.py",
        "guard.left_out = [sys.path.pop(place) for place in reversed(places)][::-1]",
        "guard.left_out = [sys.path.pop(place) for place in reversed(places)]",
        "behind a command Python looks into folders in another order, and finds another module",
        ("unit/files/test_kept_out.py::test_a_link_and_the_folder_where_the_user_is",),
    ),
    "ends-file-left-open": Fault(
        "files/regular.py",
        "    except BaseException:\n        os.close(descriptor)\n        raise\n",
        "    except BaseException:\n        raise\n",
        "each FIFO or folder that is refused stays open",
        ("unit/files/test_regular.py::test_what_is_no_file_is_refused_at_once_and_stays",),
    ),
    "ends-half-a-file-stays": Fault(
        "files/whole.py",
        "        with suppress(OSError):\n            os.unlink(temporary)\n        raise\n",
        "        raise\n",
        "each write onto a full disk leaves a temporary file",
        ("unit/files/test_whole.py::test_nothing_is_left_of_what_could_not_be_written",),
    ),
    "ends-code-of-the-disk": Fault(
        "launching/end/exits.py",
        "return FAILED if isinstance(cause, OSError) and cause.errno in _OF_DISK else CONFIG_PROBLEM",
        "return CONFIG_PROBLEM",
        "an export whose disk has failed has the exit code of a wrong argument",
        (
            "unit/commands/export/test_export.py::test_a_disk_that_fails_at_the_last_moment_leaves_the_export_that_was_there",
        ),
    ),
    "ends-code-of-the-last": Fault(
        "commands/inspection.py",
        "        return max(codes)\n",
        "        return codes[-1]\n",
        "of several checkpoints a damaged one is not in the exit code, unless it is the last",
        ("unit/commands/test_inspection.py::test_a_broken_one_is_in_the_exit_code_wherever_it_stands",),
    ),
    "ends-folders-of-ranks-stay": Fault(
        "commands/evaluate.py",
        "        if not stays:\n            shutil.rmtree(folder, ignore_errors=True)\n",
        "        if stays:\n            shutil.rmtree(folder, ignore_errors=True)\n",
        "each evaluation by several ranks leaves a folder, and one that has failed none",
        ("unit/commands/test_evaluate.py::test_the_folder_of_ranks_goes_unless_one_has_failed_whose_log_it_has",),
    ),
    "ends-threads-of-the-run": Fault(
        "commands/evaluate.py",
        "    finally:\n        torch.set_num_threads(before)\n",
        "    finally:\n        pass\n",
        "who evaluates in Python computes with the run's number of threads from then on",
        ("unit/commands/test_evaluate.py::test_it_leaves_the_number_of_threads_as_it_was",),
    ),
    "ends-token-behind-the-last": Fault(
        "commands/generate.py",
        "    if max(ids) >= model.vocab_size:\n",
        "    if max(ids) > model.vocab_size:\n",
        "a prompt with the first unknown token is an index out of range",
        ("unit/commands/test_generate.py",),
    ),
    "ends-stages-that-are-over": Fault(
        "run/preflight/check.py",
        "later = [stages[each] for each in stages if step < each < last]",
        "later = [stages[each] for each in stages if step < each <= last]",
        "a run is refused for the memory of a stage that it never comes to",
        ("unit/run/preflight/test_memory_room.py::test_a_stage_that_no_step_is_trained_at_needs_no_room",),
    ),
    "ends-room-at-the-first-stage": Fault(
        "run/preflight/room.py",
        "plans_of(config.zero.stages.values())",
        "plans_of([min(config.zero.stages.values())])",
        "a disk that is too small for a later stage is found in mid-run",
        ("unit/run/preflight/test_room.py::test_a_disk_is_to_be_large_enough_for_each_stage",),
    ),
    "ends-weights-at-the-first-stage": Fault(
        "run/preflight/memory_room.py",
        "may_share = any(plan.shards_parameters for plan in",
        "may_share = all(plan.shards_parameters for plan in",
        "a model that has room at stage 3 alone is refused where the run begins at another",
        ("unit/run/preflight/test_memory_room.py::test_a_model_of_countless_layers_is_refused_while_it_is_built",),
    ),
    "ends-half-loaded-model": Fault(
        "run/saved.py",
        "                missing.pop(id(target), None)\n        if missing:\n",
        "                missing.pop(id(target), None)\n        if len(missing) == len(targets):\n",
        "text is generated by a model of which a layer has the values it was built with",
        ("unit/run/test_saved.py::test_weights_that_are_not_all_of_the_model_are_refused",),
    ),
}
