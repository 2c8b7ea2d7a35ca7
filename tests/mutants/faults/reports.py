"""In the report of runs: what its rows say, what its files may replace, and what its page lets through."""

from tests.mutants.fault import Fault

OF_ROWS = ("unit/report/test_rows.py",)
OF_FILES = ("unit/report/test_files.py",)
OF_CURVES = ("unit/report/test_curves.py",)
OF_PAGE = ("unit/report/page/test_page.py",)

FAULTS = {
    "report-shows-what-files-say-as-html": Fault(
        "report/page/markup.py",
        'Markup(escape(printable(value, MAX_TEXT, keep="")))',
        'Markup(printable(value, MAX_TEXT, keep=""))',
        "an error or a name with a script in it runs in the reader's browser",
        OF_PAGE,
    ),
    "report-prints-what-cannot-be-printed": Fault(
        "report/page/markup.py",
        'Markup(escape(printable(value, MAX_TEXT, keep="")))',
        "Markup(escape(value[:MAX_TEXT]))",
        "a name turns the direction of the text after it",
        OF_PAGE,
    ),
    "report-lets-a-page-load-files": Fault(
        "report/page/page.py",
        "POLICY = \"default-src 'none'; ",
        'POLICY = "default-src *; ',
        "a page that was tampered with may send what it shows",
        OF_PAGE,
    ),
    "report-replaces-files-of-others": Fault(
        "report/files.py",
        "            is_ours = file.read(len(head)) == head\n",
        "            is_ours = True\n",
        "a report.html of the user's own is erased",
        OF_FILES,
    ),
    "report-writes-formulas": Fault(
        "report/files.py",
        'return f"\'{value}" if value.startswith(_STARTS_A_FORMULA) else value',
        "return value",
        "a program of tables runs what a folder is called",
        OF_FILES,
    ),
    "report-takes-a-lost-loss-for-a-good-one": Fault(
        "report/rows.py",
        'return "diverged" if result["status"] == "completed" and (no_val or no_train) else',
        "return",
        "a job whose loss became nan counts as completed",
        OF_ROWS,
    ),
    "report-believes-the-journal-before-the-result": Fault(
        "report/reading.py",
        "        result = read_result(folder / RESULT_NAME)\n",
        "        result = read_result(folder / RESULT_NAME) if event is None else _as_result(event)\n",
        "a job that has completed since is told as running",
        OF_ROWS,
    ),
    "report-follows-a-journal-out-of-its-folder": Fault(
        "report/reading.py",
        'if parts and ".." not in parts and',
        "if parts and",
        "a journal puts a row for any folder into the table",
        OF_ROWS,
    ),
    "report-reads-the-start-of-a-long-file-alone": Fault(
        "report/curves.py",
        "file.seek(round(window * (size - WINDOW_NBYTES) / (NUM_WINDOWS - 1)))",
        "file.seek(window * WINDOW_NBYTES)",
        "the curve of a long run ends early",
        OF_CURVES,
    ),
}
