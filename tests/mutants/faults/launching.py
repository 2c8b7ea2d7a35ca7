"""Faults of launching, trust, files and export."""

from tests.mutants.changes import Always, Swap
from tests.mutants.fault import Fault

FAULTS = {
    "runs-again-train-a-completed-one-anew": Fault(
        "completed_already",
        Always(False, "AUTO"),
        "a sweep again trains completed jobs anew, and replaces their results",
        "unit/launching/test_resuming.py::test_a_completed_run_is_left_as_it_is_by_one_that_would_go_on",
    ),
    "runs-go-back-in-a-completed-one": Fault(
        "_problems_of_completed",
        Swap("trains_longer and _is_within(resume, run_dir)", "_is_within(resume, run_dir)"),
        "checkpoint.resume of an older step replaces the result of a completed run",
        "unit/launching/test_resuming.py::test_a_completed_run_is_not_gone_back_in_nor_written_over_from_elsewhere",
    ),
    "runs-erase-other-checkpoints-folders": Fault(
        "remove_all",
        Swap("(STEP, PARTIAL, REMOVED, ASIDE)", "(None,)"),
        "launch.overwrite=true erases a user's files in a folder named checkpoints",
        "unit/launching/test_resuming.py::test_what_is_no_runs_stays_whatever_a_run_is_told",
    ),
    "ends-of-whom-some-heard": Fault(
        "_unanswered",
        Swap("all", "any"),
        "of three ranks one is blamed that answered another",
        "unit/launching/test_failures.py::test_a_rank_that_one_has_heard_and_another_missed_is_not_named",
    ),
    "ends-clock-turned-round": Fault(
        "Failure.write",
        Swap("+", "-"),
        "a machine whose clock is late tells of its own consequence as the first cause",
        "unit/launching/test_failures.py::test_the_clock_of_a_machine_does_not_decide_what_came_first",
    ),
    "sweep-shares-a-folder": Fault(
        "Member._require_unclaimed",
        Always(False),
        "the second job of a folder erases the first",
        "unit/launching/sweep/test_member.py::test_a_folder_that_the_user_has_named_is_for_one_job",
    ),
    "sweep-obeys-the-file-of-a-study": Fault(
        "Study._drop_strangers",
        Always(False),
        "the best trial of a study has settings that its job never had",
        "unit/launching/sweep/test_study.py::test_the_best_trial_has_no_setting_that_was_varied_before",
    ),
    "sweep-succeeds-with-a-failed-job": Fault(
        "telling.report",
        Always(False, "has_failed"),
        "a sweep ends with exit code 0 though a job has failed",
        "unit/launching/sweep/test_telling.py::test_the_exit_code_is_that_of_a_failure_if_any_job_failed",
    ),
    "trust-whatever-is-there": Fault(
        "saved._is_known",
        Swap("value in _safe_objects()", "True"),
        "a checkpoint has torch.load unpickle a file of its own",
        "unit/saved/test_trust.py::test_others_are_refused_at_any_depth",
    ),
    "trust-through-other-modules": Fault(
        "saved._find_imported",
        Swap("value.__name__.partition('.')[0] not in _PACKAGES", "False"),
        "a name leads through a module of zerotrain into the standard library",
        "unit/saved/test_trust.py::test_a_name_leads_through_our_modules_alone",
    ),
    "trust-resolves-a-file": Fault(
        "from_values",
        Swap("literal(values)", "values"),
        "a checkpoint reads the environment of who loads it",
        "unit/saved/test_trust.py::test_a_variable_of_the_environment_stays_a_text",
    ),
    "kept-out-one-checkpoint-alone": Fault(
        "_run_folder",
        Always(False, nth=1),
        "a module in a run's folder is imported for its checkpoint",
        "unit/files/test_kept_out.py::test_the_whole_run_is_kept_out_whatever_of_it_was_named",
    ),
    "control-believes-aliases": Fault(
        "_PlainLoader.compose_node",
        Always(False, "AliasEvent"),
        "nine lines of aliases are a billion values",
        "unit/files/test_untrusted.py::test_all_else_is_refused_in_one_line",
    ),
    "report-shows-what-files-say-as-html": Fault(
        "_template",
        Swap("True", "False", nth=0),
        "an error or a name with a script in it runs in the reader's browser",
        "unit/report/test_page.py::test_nothing_out_of_files_is_html_and_all_of_it_can_be_printed",
    ),
    "remote-code-of-a-model": Fault(
        "_load_pretrained",
        Swap("False", "None", nth=0),
        "a model asks on the terminal whether its code may run",
        "unit/models/test_huggingface.py::test_code_of_a_model_is_not_run_and_nobody_is_asked",
    ),
    "files-a-fifo-is-a-file": Fault(
        "only_regular",
        Swap("not stat.S_ISREG(status.st_mode)", "stat.S_ISDIR(status.st_mode)"),
        "a FIFO or a device is read and written as if it were a file",
        "unit/files/test_untrusted.py::test_what_is_no_file_is_refused_at_once_and_stays",
    ),
    "runs-empty-what-the-lock-links-to": Fault(
        "open_lock",
        Swap("os.O_NOFOLLOW", "0"),
        "a run empties the file that its lock is a link to",
        "unit/launching/test_job.py::test_what_is_no_file_is_refused_in_one_line",
    ),
    "export-in-the-order-of-memory": Fault(
        "CheckpointTensors._dense",
        Swap("flat.as_strided(shape, stride).contiguous()", "flat.view(shape)"),
        "a transposed parameter leaves with its elements in another order",
        "unit/commands/test_export.py::test_the_weights_of_four_ranks_are_opened_by_safetensors",
    ),
    "export-looks-once": Fault(
        "new_folder",
        Swap("_require_export(old, out)", "None"),
        "--overwrite erases what came while it wrote",
        "unit/commands/test_export.py::test_a_file_that_comes_while_the_new_export_is_written_stays",
    ),
    "export-merges-no-adapters": Fault(
        "_unloaded",
        Always(False, "merge"),
        "a merged export has the weights of the model without its adapters",
        "unit/commands/test_export_formats.py::test_adapters_are_merged_as_by_peft",
    ),
}
