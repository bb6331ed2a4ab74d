"""source: real files, pipes and descriptors; plain, gzip and zstd; each line once, twice over, or an error."""

import gzip
import os
import stat
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.errors import InputChanged, InputError
from overnight.source import BLOCK_BYTES, MIN_LINE_LIMIT, is_descriptor, open_source

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LIMIT = 512 << 20
DIGITS = b"".join(b'{"n":%d}\n' % number for number in range(100_000))


def open_at(path, limit=LIMIT):
    return open_source(str(path), stage=path.with_name("staged"), max_line_bytes=limit)


def give(tmp_path, data, name="in.jsonl"):
    path = tmp_path / name
    path.write_bytes(data)
    return path


def numbered(blocks):
    """Every line of the blocks with its number; one beyond the limit as its length."""
    found = []
    for block in blocks:
        if block.data is None:
            found.append((block.number, block.oversized))
        else:
            found += enumerate(block.lines(), block.number)
    return found


def lines_of(data):
    lines = data.split(b"\n")
    return list(enumerate(lines if lines[-1] else lines[:-1], 1))


def read_twice(source):
    first = numbered(source.first_pass())
    digest = source.digest
    assert numbered(source.blocks()) == first
    assert numbered(source.blocks()) == first
    assert source.digest == digest
    return first


# -- lines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [b"", b"a", b"a\n", b"a\n\n\nb", b"\n", b"\n\n", b" \n\t\n", b"a\r\nb\r\n", b"a\rb\n", b"\xe2\x80\xa8\n\xc2\x85\n",
     b"\x00\n\x0b\x0c\x1c\n", DIGITS, DIGITS[:-1], b"x" * BLOCK_BYTES, b"x" * BLOCK_BYTES + b"\n" + b"y",
     b"x" * (BLOCK_BYTES - 1) + b"\n" + DIGITS, b"\n" * (BLOCK_BYTES + 5), b"x\n" * BLOCK_BYTES,
     b"a\n" + b"x" * 3 * BLOCK_BYTES + b"\nb"],
)  # fmt: skip
def test_lines_end_at_line_feeds_only_and_are_the_same_twice(tmp_path, data):
    with open_at(give(tmp_path, data)) as source:
        assert read_twice(source) == lines_of(data)


@given(st.lists(st.integers(0, 5) | st.integers(BLOCK_BYTES - 3, BLOCK_BYTES + 3), max_size=6), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_line_is_given_out_whole_or_as_too_long(tmp_path_factory, sizes, is_ended):
    data = b"\n".join(b"x" * size for size in sizes) + (b"\n" if is_ended else b"")
    path = give(tmp_path_factory.mktemp("lines"), data)
    with open_at(path, MIN_LINE_LIMIT) as source:
        expected = [(number, line if len(line) <= MIN_LINE_LIMIT else len(line)) for number, line in lines_of(data)]
        assert read_twice(source) == expected


def test_blocks_hold_whole_lines_and_are_of_bounded_size(tmp_path):
    with open_at(give(tmp_path, DIGITS)) as source:
        blocks = list(source.first_pass())
    assert len(blocks) > 3
    assert all(block.data.endswith(b"\n") for block in blocks)
    assert max(len(block.data) for block in blocks) < BLOCK_BYTES + 20
    assert b"".join(block.data for block in blocks) == DIGITS


@pytest.mark.parametrize("rest", [b"a\n", b"", b"\xef\xbb\xbfa\n", b"\xff\n"])
def test_one_byte_order_mark_is_dropped_and_only_where_the_input_begins(tmp_path, rest):
    with open_at(give(tmp_path, b"\xef\xbb\xbf" + rest)) as source:
        assert read_twice(source) == lines_of(rest)
    with open_at(give(tmp_path, b"a\n\xef\xbb\xbf" + rest)) as source:
        assert read_twice(source) == lines_of(b"a\n\xef\xbb\xbf" + rest)


# -- a line beyond the limit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", [1, 2, 44 << 10, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 5 * BLOCK_BYTES])
@pytest.mark.parametrize("before", [b"", b"a\n", b"a\n" * 1000])
@pytest.mark.parametrize("after", [b"", b"\n", b"\nb\nc\n", b"\n\nb", b"\n" + b"y" * (MIN_LINE_LIMIT + 9) + b"\nz\n"])
def test_a_line_beyond_the_limit_is_passed_over_and_no_line_with_it(tmp_path, over, before, after):
    data = before + b"x" * (MIN_LINE_LIMIT + over) + after
    expected = [(number, line if len(line) <= MIN_LINE_LIMIT else len(line)) for number, line in lines_of(data)]
    with open_at(give(tmp_path, data), MIN_LINE_LIMIT) as source:
        assert read_twice(source) == expected


def test_a_line_of_exactly_the_limit_is_read(tmp_path):
    data = b"x" * MIN_LINE_LIMIT + b"\nb\n"
    with open_at(give(tmp_path, data), MIN_LINE_LIMIT) as source:
        assert read_twice(source) == lines_of(data)


def test_a_limit_below_the_least_is_the_least(tmp_path):
    data = b"x" * 1000 + b"\nb\n"
    with open_at(give(tmp_path, data), 10) as source:
        assert source.max_line_bytes == MIN_LINE_LIMIT
        assert read_twice(source) == lines_of(data)


def test_a_huge_line_does_not_fill_the_memory(tmp_path):
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.write(b"a\n")
        file.truncate(400 << 20)  # zeros, and no disk
        file.seek(0, 2)
        file.write(b"\nb\n")
    script = f"""
        import resource
        from pathlib import Path
        from overnight.source import open_source
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with open_source({str(path)!r}, stage=Path({str(tmp_path / "s")!r}), max_line_bytes=1 << 20) as source:
            print([(b.number, b.data, b.oversized) for b in source.first_pass()])
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], check=True, capture_output=True, text=True, timeout=60
    )
    blocks, grown = done.stdout.splitlines()
    assert blocks == f"[(1, b'a\\n', 0), (2, None, {(400 << 20) - 2}), (3, b'b\\n', 0)]"
    assert int(grown) / (1024 if sys.platform == "darwin" else 1) < 20 << 10  # KiB


# -- compressed ------------------------------------------------------------------------------------------------------


def frames(data, compress):
    """Several members or frames, one of them empty, cut in the midst of lines."""
    return compress(data[:1000]) + compress(b"") + compress(data[1000:1001]) + compress(data[1001:])


SKIPPABLE = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"
COMPRESSED = {
    "gzip": gzip.compress(DIGITS),
    "gzip members": frames(DIGITS, gzip.compress),
    "gzip padded with zeros": gzip.compress(DIGITS) + bytes(512),
    "zstd": zstd.compress(DIGITS),
    "zstd frames": frames(DIGITS, zstd.compress),
    "zstd after a skippable frame": SKIPPABLE + zstd.compress(DIGITS) + SKIPPABLE,
}


@pytest.mark.parametrize("data", COMPRESSED.values(), ids=COMPRESSED)
@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in.zst"])
def test_what_is_compressed_is_told_by_its_bytes_and_not_by_its_name(tmp_path, data, name):
    with open_at(give(tmp_path, data, name)) as source:
        assert read_twice(source) == lines_of(DIGITS)


def test_the_digest_is_that_of_what_is_inside(tmp_path):
    digests = set()
    for data in [DIGITS, *COMPRESSED.values()]:
        with open_at(give(tmp_path, data)) as source:
            read_twice(source)
            digests.add(source.digest)
    assert len(digests) == 1
    assert len(digests.pop()) == 32


@pytest.mark.parametrize("compress", [gzip.compress, zstd.compress])
def test_a_byte_order_mark_inside_is_dropped_and_nothing_inside_is_nothing(tmp_path, compress):
    with open_at(give(tmp_path, compress(b"\xef\xbb\xbfa\n"))) as source:
        assert read_twice(source) == [(1, b"a")]
    with open_at(give(tmp_path, compress(b""))) as source:
        assert read_twice(source) == []


def test_a_byte_order_mark_that_is_cut_by_a_members_end_is_dropped(tmp_path):
    with open_at(give(tmp_path, gzip.compress(b"\xef") + gzip.compress(b"\xbb\xbfa\n"))) as source:
        assert read_twice(source) == [(1, b"a")]


def spoil(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0xFF] * 8) + data[middle + 8 :]


CHECKED = zstd.compress(DIGITS, options={zstd.CompressionParameter.checksum_flag: 1})
BROKEN = {
    "gzip cut": COMPRESSED["gzip"][:-9], "gzip without its end": COMPRESSED["gzip"][:-8],
    "gzip cut at once": b"\x1f\x8b", "gzip spoiled": spoil(COMPRESSED["gzip"]),
    "gzip and then other bytes": COMPRESSED["gzip"] + b"abc", "gzip with another checksum":
    COMPRESSED["gzip"][:-8] + b"\0\0\0\0" + COMPRESSED["gzip"][-4:],
    "zstd cut": COMPRESSED["zstd"][:-5], "zstd cut at once": b"\x28\xb5\x2f\xfd",
    "zstd spoiled": spoil(CHECKED),
    "zstd and then other bytes": COMPRESSED["zstd"] + b"abcdefgh",
    "second zstd frame cut": COMPRESSED["zstd frames"][:-5],
}  # fmt: skip


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_what_is_cut_or_spoiled_cannot_be_read(tmp_path, data):
    with open_at(give(tmp_path, data)) as source, pytest.raises(InputError, match="Cannot read the input"):
        numbered(source.first_pass())


# -- what changes between two readings -------------------------------------------------------------------------------


def test_a_file_replaced_by_a_rename_is_still_the_one_that_was_opened(tmp_path):
    path = give(tmp_path, DIGITS)
    with open_at(path) as source:
        first = numbered(source.first_pass())
        give(tmp_path, b"other\n", "other").replace(path)
        assert numbered(source.blocks()) == first
        assert source.stat().st_size == len(DIGITS)
    with open_at(path) as source:
        assert read_twice(source) == [(1, b"other")]


def test_a_file_that_was_removed_is_read_all_the_same(tmp_path):
    path = give(tmp_path, DIGITS)
    with open_at(path) as source:
        path.unlink()
        assert read_twice(source) == lines_of(DIGITS)


def read_until_changed(source):
    """The lines that a later reading gives out, and what it says when it ends early."""
    given = []
    try:
        for block in source.blocks():
            given += numbered([block])
    except InputChanged as error:
        return given, str(error)
    return given, None


@pytest.mark.parametrize("at", [0, 5, 300_000, len(DIGITS) // 2, len(DIGITS) - 2])
def test_a_changed_byte_ends_the_reading_before_its_line_is_given_out(tmp_path, at):
    path = give(tmp_path, DIGITS)
    with open_at(path) as source:
        first = numbered(source.first_pass())
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"#")
        given, error = read_until_changed(source)
        assert "changed while the run was going on" in error
        assert f"the lines from {len(given) + 1:,} on differ" in error
        assert given == first[: len(given)]
        assert not any(b"#" in line for _, line in given)


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES, 300_000, len(DIGITS) - 1, len(DIGITS) - 9])
def test_a_file_cut_short_ends_the_reading(tmp_path, size):
    path = give(tmp_path, DIGITS)
    with open_at(path) as source:
        first = numbered(source.first_pass())
        os.truncate(path, size)
        given, error = read_until_changed(source)
        assert error
        assert given == first[: len(given)]


def test_a_file_cut_between_two_blocks_ends_the_reading(tmp_path):
    path = give(tmp_path, DIGITS)
    with open_at(path) as source:
        first = next(iter(source.first_pass())).data
        numbered(source.first_pass())
        os.truncate(path, len(first))
        with pytest.raises(InputChanged, match="it ends after line"):
            numbered(source.blocks())


@pytest.mark.parametrize("data", [b"", b"a", b"a\n", DIGITS, b"x" * BLOCK_BYTES, b"y" * (BLOCK_BYTES - 1) + b"\n"])
@pytest.mark.parametrize("more", [b"b\n", b"\n", b"x"])
def test_a_file_that_grew_ends_the_reading_before_a_new_line_is_given_out(tmp_path, data, more):
    path = give(tmp_path, data)
    with open_at(path) as source:
        first = numbered(source.first_pass())
        with path.open("ab") as file:
            file.write(more)
        given, error = read_until_changed(source)
        assert error
        assert given == first[: len(given)]


def test_a_compressed_file_that_was_spoiled_meanwhile_has_changed(tmp_path):
    path = give(tmp_path, COMPRESSED["gzip"])
    with open_at(path) as source:
        numbered(source.first_pass())
        os.truncate(path, len(COMPRESSED["gzip"]) - 9)
        with pytest.raises(InputChanged):
            numbered(source.blocks())


# -- what can be read only once --------------------------------------------------------------------------------------


def feed(fifo, data):
    thread = threading.Thread(target=lambda: fifo.write_bytes(data), daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("data", [b"", DIGITS, COMPRESSED["gzip"], COMPRESSED["zstd frames"]])
def test_a_fifo_is_staged_for_the_user_alone_and_the_stage_goes_with_it(tmp_path, data):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    thread = feed(fifo, data)
    stage = tmp_path / "new" / "folder" / "staged"
    with open_source(str(fifo), stage=stage, max_line_bytes=LIMIT) as source:
        thread.join()
        assert source.staged == stage
        assert stat.S_IMODE(stage.stat().st_mode) == 0o600
        assert stage.read_bytes() == data
        assert read_twice(source) == (lines_of(DIGITS) if data else [])
    assert not stage.exists()


def test_a_stage_goes_also_when_the_run_fails(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    feed(fifo, b"a\n")
    source = open_at(fifo)

    def fail():
        with source:
            assert source.staged.exists()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not (tmp_path / "staged").exists()


def test_what_an_earlier_run_left_in_the_stages_place_is_replaced_never_written_through(tmp_path):
    fifo, stage, other = tmp_path / "fifo", tmp_path / "staged", tmp_path / "other"
    other.write_bytes(b"precious")
    stage.symlink_to(other)
    os.mkfifo(fifo)
    feed(fifo, b"a\n")
    with open_at(fifo) as source:
        assert read_twice(source) == [(1, b"a")]
        assert not stage.is_symlink()
    assert other.read_bytes() == b"precious"


def test_a_stage_that_cannot_be_made_is_an_input_error(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "file").write_bytes(b"")
    thread = feed(fifo, b"")
    with pytest.raises(InputError, match="--output-tmp-dir"):
        open_source(str(fifo), stage=tmp_path / "file" / "staged", max_line_bytes=LIMIT)
    thread.join()


def test_a_reading_that_breaks_leaves_no_stage(tmp_path):
    # /proc/self/mem opens, and its first byte cannot be read.
    if not os.path.exists("/proc/self/mem"):  # noqa: PTH110 - a path of the system
        pytest.skip("no /proc here")
    with pytest.raises(InputError):
        open_source("/proc/self/mem", stage=tmp_path / "staged", max_line_bytes=LIMIT)
    assert not list(tmp_path.iterdir())


CHILD = """
import sys
from pathlib import Path
from overnight.source import open_source
with open_source(sys.argv[1], stage=Path(sys.argv[2]), max_line_bytes=1 << 20) as source:
    first = [block.data for block in source.first_pass()]
    again = [block.data for block in source.blocks()]
    print(source.name, source.staged is not None, first == again, sum(map(len, first)))
print(Path(sys.argv[2]).exists())
"""


@pytest.mark.parametrize("path", ["-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"])
@pytest.mark.parametrize("kind", ["file", "pipe", "nothing"])
def test_standard_input_is_staged_whatever_stands_behind_it(tmp_path, path, kind):
    if path.startswith("/proc") and sys.platform != "linux":
        pytest.skip("no /proc here")
    command = [sys.executable, "-c", CHILD, path, str(tmp_path / "staged")]
    if kind == "file":
        with give(tmp_path, DIGITS).open("rb") as file:
            done = subprocess.run(command, stdin=file, capture_output=True, text=True, check=True, timeout=60)
    else:
        data = DIGITS if kind == "pipe" else b""
        done = subprocess.run(command, input=data, capture_output=True, check=True, timeout=60)
        done.stdout = done.stdout.decode()
    name = "standard input" if path == "-" else path
    size = 0 if kind == "nothing" else len(DIGITS)
    assert done.stdout == f"{name} True True {size}\nFalse\n"


def test_an_open_descriptor_is_staged_and_the_file_behind_it_is_not_moved_nor_closed(tmp_path):
    with give(tmp_path, DIGITS).open("rb") as file:
        name = f"/dev/fd/{file.fileno()}"
        with open_source(name, stage=tmp_path / "staged", max_line_bytes=LIMIT) as source:
            assert source.staged
            assert read_twice(source) == lines_of(DIGITS)
        assert file.read(1) in {b"{", b""}


def test_a_link_to_standard_input_is_read_twice(tmp_path):
    link = tmp_path / "link"
    link.symlink_to("/dev/stdin")
    command = [sys.executable, "-c", CHILD, str(link), str(tmp_path / "staged")]
    with give(tmp_path, DIGITS).open("rb") as file:
        file.seek(0)
        done = subprocess.run(command, stdin=file, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split()[2:] == ["True", str(len(DIGITS)), "False"]


def test_a_pipe_that_someone_made_non_blocking_is_read_to_its_end(tmp_path):
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    command = [sys.executable, "-c", CHILD, "-", str(tmp_path / "staged")]
    child = subprocess.Popen(command, stdin=ours, stdout=subprocess.PIPE, text=True)
    os.close(ours)
    with os.fdopen(theirs, "wb", 0) as pipe:
        time.sleep(0.5)  # so that the child finds nothing there at first
        pipe.write(b"a\n")
        time.sleep(0.1)
        pipe.write(b"b\n")
    assert child.communicate(timeout=60)[0] == "standard input True True 4\nFalse\n"


def test_descriptors_are_told_from_files(tmp_path):
    assert is_descriptor("-")
    assert is_descriptor("/dev/fd/3")
    assert not is_descriptor(str(tmp_path / "file"))


def test_a_regular_file_is_read_in_its_place(tmp_path):
    path = give(tmp_path, b"a\n")
    with open_at(path) as source:
        assert source.staged is None
        assert read_twice(source) == [(1, b"a")]
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_device_is_an_empty_input(tmp_path):
    with open_source("/dev/null", stage=tmp_path / "staged", max_line_bytes=LIMIT) as source:
        assert read_twice(source) == []


# -- what cannot be opened -------------------------------------------------------------------------------------------


def test_what_cannot_be_opened_says_why(tmp_path):
    stage = tmp_path / "staged"
    for path, words in [
        (str(tmp_path / "none"), "No such file"), (str(tmp_path), "it is a folder"), ("a\0b", "null"), ("", "folder"),
        ("x" * 5000, "too long"),
    ]:  # fmt: skip
        with pytest.raises(InputError, match=words):
            open_source(path, stage=stage, max_line_bytes=LIMIT)
    assert not stage.exists()
