from benchmarks.data import main


def test_reads_are_measured_in_each_way_and_the_file_is_removed(tmp_path, capsys):
    options = ["--gigabytes", "0.002", "--batch", "2", "--seq-len", "64", "--batches", "2", "--rounds", "1"]
    main(["reads", "--folder", str(tmp_path), *options])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split("  ")[0] for row in rows] == [
        "memory map (before)",
        "memory map, MADV_RANDOM",
        "pread (TokenWindows.rows)",
    ]
    assert all(float(figure) >= 0 for row in rows for figure in row.split()[-3:])
    assert not list(tmp_path.iterdir())
