import json
import os
import tracemalloc

import pytest

from zerotrain.files.untrusted import (
    MAX_DEPTH,
    Each,
    FileName,
    FilePath,
    Natural,
    OneOf,
    Optional,
    UntrustedFileError,
    has_schema,
    parse_json,
    read_json,
    read_regular,
    require_schema,
)


def test_a_fifo_a_device_and_a_folder_are_refused_and_nobody_waits(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path, kind in ((tmp_path / "fifo", "a FIFO"), ("/dev/zero", "a device")):
        with pytest.raises(UntrustedFileError, match=f"it is {kind}, and must be a regular file"):
            read_regular(path, max_nbytes=10)
    with pytest.raises((UntrustedFileError, IsADirectoryError)):
        read_regular(tmp_path, max_nbytes=10)
    (tmp_path / "link").symlink_to("/dev/zero")
    with pytest.raises(UntrustedFileError, match="a device"):
        read_regular(tmp_path / "link", max_nbytes=10)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "absent", max_nbytes=10)


def test_a_file_is_read_up_to_its_limit_and_not_beyond(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert read_regular(path, max_nbytes=10) == b"0123456789"
    with pytest.raises(UntrustedFileError, match="more than the 9 bytes"):
        read_regular(path, max_nbytes=9)
    os.truncate(path, 1 << 40)  # a sparse terabyte is refused by its size, before a byte is read
    with pytest.raises(UntrustedFileError, match="more than the"):
        read_regular(path, max_nbytes=1 << 20)


def test_a_small_file_takes_little_room_however_much_is_allowed(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 3_000_000)
    tracemalloc.start()
    try:
        assert len(read_regular(tmp_path / "file", max_nbytes=1 << 40)) == 3_000_000
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_a_file_that_does_not_tell_its_size_is_read_up_to_the_limit():
    said = read_regular("/proc/self/status", max_nbytes=1 << 20)
    assert said.startswith(b"Name:")
    with pytest.raises(UntrustedFileError, match="more than the 10 bytes"):
        read_regular("/proc/self/status", max_nbytes=10)


@pytest.mark.parametrize("opening", ["[", '{"a":', '{"[":['])
def test_what_is_nested_too_deeply_is_refused_in_one_line(opening):
    for depth in (MAX_DEPTH + 1, 2_000, 200_000):
        with pytest.raises(UntrustedFileError, match="deep"):
            parse_json(opening * depth, object)


def test_brackets_within_texts_are_not_depth():
    text = "[" * 5_000 + '"\\' + "{" * 5_000
    assert parse_json(json.dumps({text: [text]}), object) == {text: [text]}


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b'{"a": 1', b'{"a": 01}', b"[1," * 30, b'"' + b"\\" * 9])
def test_what_is_no_json_is_refused_in_one_printable_line(text):
    with pytest.raises(UntrustedFileError, match="it is no JSON") as refused:
        parse_json(text, object)
    assert str(refused.value).isprintable()


def test_a_number_of_a_million_digits_is_refused():
    with pytest.raises(UntrustedFileError):
        parse_json("9" * 10**6, object)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (int, 3),
        (float, 3),
        ((str, None), None),
        (object, {"anything": [1]}),
        ({"a": int}, {"a": 1, "other keys": "pass"}),
        ({"a": Optional(int)}, {}),
        ([Natural(5)], [0, 5]),
        (Each(FileName()), {"x": "rank-0.bin"}),
        (OneOf((1, "one")), "one"),
    ],
)
def test_what_has_the_schema_passes(schema, value):
    require_schema(value, schema)


@pytest.mark.parametrize(
    ("schema", "value", "says"),
    [
        (int, True, "it is True, and must be a whole number"),
        (int, 3.0, "it is 3.0, and must be a whole number"),
        ((str, None), 1, "it is 1, and must be a text or null"),
        ({"a": int}, {}, "a is missing, and must be there"),
        ({"a": {"b": [str]}}, {"a": {"b": ["x", 1]}}, "a.b.1 is 1, and must be a text"),
        ({"a": Optional(int)}, {"a": "1"}, "a is 1, and must be a whole number"),
        ([int], {}, "it is {}, and must be a list"),
        (Each(int), [], r"it is \[\], and must be an object"),
        ({}, None, "it is None, and must be an object"),
        (Natural(), -1, "it is -1, and must be a whole number from 0 to 9223372036854775807"),
        (Natural(), 2**63, "must be a whole number from 0 to"),
        (OneOf((1, 2)), True, "it is True, and must be one of 1, 2"),
        (str, ["\x1b[31m" * 99], "must be a text"),
    ],
)
def test_what_has_not_the_schema_is_refused_with_its_place(schema, value, says):
    with pytest.raises(UntrustedFileError, match=says) as refused:
        require_schema(value, schema)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\\b", "a\0", "a\nb", "\x1b[2J", 3, None, ["x"]]
)
def test_a_name_that_leaves_the_folder_is_no_name(name):
    with pytest.raises(UntrustedFileError, match="must be the name of a file in this folder"):
        require_schema(name, FileName())


def test_a_plain_name_is_a_file_of_the_folder():
    assert has_schema("rank-0.bin", FileName())


def test_a_file_of_json_is_read_by_its_schema(tmp_path):
    (tmp_path / "file.json").write_text('{"step": 3}')
    assert read_json(tmp_path / "file.json", {"step": Natural()}, max_nbytes=100) == {"step": 3}


@pytest.mark.parametrize("name", ["a", "a/b.txt", ".a/b"])
def test_a_path_within_its_folder_is_one(name):
    assert FilePath().problem(name) is None


@pytest.mark.parametrize(
    "name", ["a/../b", "../a", "/a", "a//b", "a/", "", ".", "a/./b", "a\x1b/b", "a\0", 3, ["a"], None]
)
def test_a_path_that_leads_out_of_its_folder_or_cannot_be_shown_is_none(name):
    assert FilePath().problem(name) is not None
