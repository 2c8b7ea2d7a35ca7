"""A package that is not installed is named, with what installs it."""

import gzip
import sys

import pytest

from zerotrain.files.terminal import package


def test_a_package_that_is_there_is_imported():
    assert package("gzip", extra="zstd", needed_by="a file") is gzip


def test_one_that_is_not_is_told_with_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    said = r"^data.path: a.parquet needs pyarrow, which is not installed; pip install 'zerotrain\[parquet\]'$"
    with pytest.raises(ImportError, match=said):
        package("pyarrow.parquet", extra="parquet", needed_by="data.path: a.parquet")
