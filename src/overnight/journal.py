"""The journal: rows that finished before their turn, on disk until the output has them.

It lies beside the output. OUTPUT.ahead says whose it is, in lines of JSON:

    {"overnight":"journal","format":1,"input":{…},"settings":{…},…}    the first line
    {"settings":{…},"settings_digest":"…"}                             other settings that a run went on with
    {"run":{"pid":…,"host":"…","at":…}}                                a run began, or went on

The rows are in segments, OUTPUT.ahead.1, OUTPUT.ahead.2 …, each the row that it will be with its input line first:

    {"line":17,"id":"batch_req_…",…}

For editors:
- A segment goes when none of its rows waits any more, and only after a sync of the output that followed their copy.
- Where few rows keep a segment alive they are moved to the last one, so that all segments together never take more
  than twice the bytes that wait, plus 32 MiB.
- After an error nothing may be dropped: what counts as given back may not have reached its new file. So whoever
  calls leaves out `end_sync` from then on.
- OUTPUT.ahead carries the lock: it is opened once, never renamed, and closed at the end only. That is why it holds
  no rows: a file that must stay can give nothing back.
"""

import bisect
import re
from array import array
from collections.abc import Container, Iterator
from pathlib import Path

from .disk import Disk
from .records import Row
from .rows import index_of, settings_in
from .segments import LENGTH_BITS, MAX_LENGTH, Segment, is_json, make_place, row_in, rows_in
from .window import NOWHERE, Window

SEGMENT_BYTES = 8 << 20
# How many segments' worth of bytes there may be beyond twice those that wait …
SLACK_SEGMENTS = 1.25  # … before rows are moved out of the oldest
HELD_SEGMENTS = 2.75  # … before nothing more may start, or be given back, until a sync is through
MAX_UNSYNCED = 16  # segments: each is an open file during a sync
RECENT_BYTES = 4 << 20  # rows that are also kept in memory
READ_BYTES = 256 << 10
SCAN_BYTES = 1 << 20


class Journal:
    """Rows that wait, on disk; see the module. Errors are OSError."""

    def __init__(self, path: Path, descriptor: int, disk: Disk, segment_bytes: int = SEGMENT_BYTES) -> None:
        """`descriptor` is OUTPUT.ahead's, open (and locked) for as long as the journal is."""
        self.path = path
        self.segment_bytes = segment_bytes
        self.live = 0  # bytes of the rows that wait
        self.size = 0  # bytes of all segments, with what the next flush writes
        self.torn = 0  # bytes that `load` found to be no whole row
        self._disk = disk
        self._descriptor = descriptor
        self._segments: list[Segment] = []
        self._number = 0  # of the last segment that was made
        self._end = 1  # the address behind it; no row lies at 0: that place is NOWHERE
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._recent: dict[int, Row] = {}
        self._recent_bytes = 0
        self._block: tuple[int, bytes] = (0, b"")  # address and bytes of what was read last
        self._round = 0
        self._dead = 0  # bytes of segments that go after the next sync
        self._syncing: list[Segment] = []
        self._has_new_names = False  # a segment was made since the folder was synced
        self._is_sealed = True  # nothing more goes to the last segment: it is full, or an earlier run's and maybe torn

    # -- the first file

    def read_head(self) -> bytes:
        """What OUTPUT.ahead holds."""
        head = b""
        while part := self._disk.read(self._descriptor, READ_BYTES, len(head)):
            head += part
        return head

    def begin(self, header: bytes) -> None:
        """Become a new journal: the rows go first, then the head is replaced; all synced."""
        self.remove_rows()
        self._disk.truncate(self._descriptor, 0)
        self._disk.sync(self._descriptor)
        self._disk.sync_folder(self.path.parent)
        if header:
            self.note(header)

    def note(self, line: bytes) -> None:
        """Add a line to the head, and sync it; what a crash left of a torn last line goes."""
        head = self.read_head()
        end = head.rfind(b"\n") + 1
        if is_json(head[end:]):  # only its newline is missing
            line = head[end:] + b"\n" + line
        elif end < len(head):
            self._disk.truncate(self._descriptor, end)
        self._disk.write(self._descriptor, line + b"\n", end)
        self._disk.sync(self._descriptor)

    # -- rows in

    def append(self, row: Row) -> int:
        """Take a row that waits; its place comes back. It is in the file after the next flush."""
        place = self._append_line(b'{"line":%d,' % row.line + row.data[1:])
        self._recent[place] = row
        self._recent_bytes += len(row.data)
        while self._recent_bytes > RECENT_BYTES and len(self._recent) > 1:
            self._recent_bytes -= len(self._recent.pop(next(iter(self._recent))).data)
        return place

    def _append_line(self, line: bytes) -> int:
        if self._segments and self._segments[-1].size + self._pending_bytes >= self.segment_bytes:
            self.flush()
        segment = self._add_segment() if self._is_sealed else self._segments[-1]
        place = make_place(segment.base + segment.size + self._pending_bytes, len(line))
        self._pending.append(line)
        self._pending_bytes += len(line)
        self.size += len(line)
        self.live += len(line)
        segment.live += len(line)
        return place

    def flush(self) -> None:
        """Write what is pending; a write that fails leaves the file as it was."""
        if not self._pending:
            return
        segment = self._segments[-1]
        descriptor = self._open(segment)
        data = b"".join(self._pending)
        try:
            self._disk.write(descriptor, data, segment.size)
        except OSError:
            self._disk.truncate(descriptor, segment.size)
            raise
        segment.size += len(data)
        segment.is_dirty = True
        self._pending, self._pending_bytes = [], 0
        if segment.size >= self.segment_bytes:
            self._is_sealed = True
            self._note_death(segment)

    def _add_segment(self) -> Segment:
        if self._segments:
            self._end = self._segments[-1].base + self._segments[-1].size
        segment = Segment(Path(f"{self.path}.{self._number + 1}"), self._number + 1, self._end)
        segment.descriptor = self._disk.open(segment.path, create=True)
        self._segments.append(segment)
        self._number += 1
        self._disk.truncate(segment.descriptor, 0)
        segment.is_dirty = self._has_new_names = True
        self._is_sealed = False
        return segment

    # -- rows out

    def take(self, place: int) -> Row:
        """The row at a place, which then waits no longer. Raises ValueError where no whole row is there."""
        row = self._recent.pop(place, None)
        if row is not None:
            self._recent_bytes -= len(row.data)
            length = place & MAX_LENGTH or len(b'{"line":%d,' % row.line) + len(row.data) - 1
        else:
            line = self._read(place)
            length = len(line)
            _, row = row_in(line)
        self._give_up(place, length)
        return row

    def peek(self, place: int) -> tuple[str, Row]:
        """The id of the row at a place, and the row, which goes on waiting. Raises ValueError."""
        return row_in(self._read(place))

    def _give_up(self, place: int, length: int) -> None:
        segment = self._segment_at(place >> LENGTH_BITS)
        segment.live -= length
        self.live -= length
        self._note_death(segment)

    def _note_death(self, segment: Segment) -> None:
        is_open = segment is self._segments[-1] and not self._is_sealed
        if segment.live == 0 and segment.died_in is None and not is_open:
            segment.died_in = self._round
            self._dead += segment.size

    def _read(self, place: int) -> bytes:
        """A row's line. Rows written one after the other are mostly read so: a block at a time."""
        address, length = place >> LENGTH_BITS, place & MAX_LENGTH
        start, block = self._block
        if not (length and start <= address and address + length <= start + len(block)):
            segment = self._segment_at(address)
            size = max(READ_BYTES, length)
            while True:
                block = self._disk.read(self._open(segment), size, address - segment.base)
                if length or b"\n" in block or len(block) < size:
                    break
                size *= 8  # a row that is longer than a place can say
            start = address
            self._block = (start, block) if length else (0, b"")
            length = length or block.find(b"\n") + 1
        line = block[address - start : address - start + length]
        if len(line) != length or not line.endswith(b"\n"):
            raise ValueError(f"{self.path} holds no whole row at {address}")
        return line

    def _segment_at(self, address: int) -> Segment:
        return self._segments[bisect.bisect_right(self._segments, address, key=_base) - 1]

    def _open(self, segment: Segment) -> int:
        if segment.descriptor is None:
            for other in self._segments[:-1]:
                if other not in self._syncing:
                    self._close(other)
            segment.descriptor = self._disk.open(segment.path)
        return segment.descriptor

    def _close(self, segment: Segment) -> None:
        descriptor, segment.descriptor = segment.descriptor, None
        if descriptor is not None:
            self._disk.close(descriptor)

    # -- syncs and room

    @property
    def is_heavy(self) -> bool:
        """Whether so much waits for a sync that nothing more should start, or be given back."""
        return self.size > 2 * self.live + int(HELD_SEGMENTS * self.segment_bytes)

    @property
    def wants_sync(self) -> bool:
        """Whether a sync would give much room back, or many files."""
        unsynced = sum(segment.is_dirty and not segment.is_earlier for segment in self._segments[-MAX_UNSYNCED:])
        return self._dead >= self.segment_bytes or unsynced == MAX_UNSYNCED

    def begin_sync(self) -> list[int]:
        """The descriptors to sync; `end_sync` gives back what died before this call."""
        self._round += 1
        dirty = [segment for segment in self._segments if segment.is_dirty]
        earlier = [segment for segment in dirty if segment.is_earlier][:MAX_UNSYNCED]
        self._syncing = earlier + [segment for segment in dirty if not segment.is_earlier]
        for segment in self._syncing:
            segment.is_dirty = False
        return [self._open(segment) for segment in self._syncing]

    def sync_names(self) -> None:
        """Return when the names of new segments are on the disk; may be called in a thread, between the two others."""
        if self._has_new_names:
            self._has_new_names = False
            self._disk.sync_folder(self.path.parent)

    def end_sync(self) -> None:
        """The sync is through, and so is the output's: segments that died before it began go."""
        self.sync_names()
        synced, self._syncing = self._syncing, []
        for segment in synced:
            if segment is not self._segments[-1]:
                self._close(segment)
        gone = [each for each in self._segments if each.died_in is not None and each.died_in < self._round]
        for segment in gone:
            self._drop(segment)

    def _drop(self, segment: Segment) -> None:
        self._close(segment)
        self._disk.remove(segment.path)
        if segment is self._segments[-1]:
            self._end = segment.base + segment.size
        self._segments.remove(segment)
        self.size -= segment.size
        self._dead -= segment.size
        self._block = (0, b"")

    def move_rows(self, window: Window) -> bool:
        """Where few rows keep the oldest segment alive, append a slice's again; whether there may be more comes back.

        Raises ValueError where a row that waits cannot be read.
        """
        if self.size - self._dead <= 2 * self.live + int(SLACK_SEGMENTS * self.segment_bytes):
            return False
        segment = next((each for each in self._segments if each.live), None)
        if segment is None or (segment is self._segments[-1] and not self._is_sealed):
            return False
        address = segment.base + segment.moved_to
        block = self._disk.read(self._open(segment), SCAN_BYTES, segment.moved_to)
        end = block.rfind(b"\n") + 1
        if not end:  # a row longer than the block
            block = self._read(make_place(address, 0))
            end = len(block)
        segment.moved_to += end
        start = 0
        for length, row_id in rows_in(block[:end]):
            place = make_place(address + start, length)
            if row_id and window.place(index_of(row_id)) == place:
                window.move(index_of(row_id), self._move(place, block[start : start + length]))
            start += length
        self.flush()
        return True

    def _move(self, place: int, line: bytes) -> int:
        moved = self._append_line(line)
        row = self._recent.pop(place, None)
        if row is not None:
            self._recent[moved] = row
        self._give_up(place, len(line))
        return moved

    # -- reading back, removing

    def load(self, first: int, settings: Container[str]) -> "array[int]":
        """The places of the rows that an earlier run left, for the requests from `first` on; NOWHERE in the gaps.

        Rows under other settings than those given, and rows that are damaged, are dropped. Of two rows for one
        request the newer counts.
        """
        self.close()
        self._reset()
        places = array("Q")
        for path in self._find_segments():
            self._number = int(path.name.rpartition(".")[2])
            base = self._segments[-1].base + self._segments[-1].size if self._segments else self._end
            segment = Segment(path, self._number, base)
            self._segments.append(segment)
            for place, row_id in self._scan(segment):
                index = index_of(row_id) - first
                if index < 0 or settings_in(row_id) not in settings:
                    continue
                if index >= len(places):
                    places.frombytes(bytes(8 * (index + 1 - len(places))))
                if places[index] != NOWHERE:
                    self._forget(places[index])
                places[index] = place
                self._adopt(segment, place)
        self.close()
        for segment in self._segments:
            segment.is_dirty = segment.is_earlier = True
            self._note_death(segment)
        return places

    def _adopt(self, segment: Segment, place: int) -> None:
        length = place & MAX_LENGTH or len(self._read(place))
        segment.live += length
        self.live += length

    def _forget(self, place: int) -> None:
        length = place & MAX_LENGTH or len(self._read(place))
        self._segment_at(place >> LENGTH_BITS).live -= length
        self.live -= length

    def _scan(self, segment: Segment) -> Iterator[tuple[int, str]]:
        """The place and the id of each whole row in a segment; what follows the last line's end is none."""
        descriptor = self._open(segment)
        offset, rest = 0, b""
        while data := self._disk.read(descriptor, SCAN_BYTES, offset + len(rest)):
            rest += data
            end = rest.rfind(b"\n") + 1
            whole, rest = rest[:end], rest[end:]
            address = segment.base + offset
            for length, row_id in rows_in(whole):
                if row_id:
                    yield make_place(address, length), row_id
                else:
                    self.torn += length
                address += length
            offset += end
        self.torn += len(rest)
        segment.size = offset + len(rest)
        self.size += segment.size

    def _find_segments(self) -> list[Path]:
        names = re.compile(re.escape(self.path.name) + r"\.[1-9][0-9]*")
        found = [path for path in self.path.parent.iterdir() if names.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.name.rpartition(".")[2]))

    def remove_rows(self) -> None:
        """Remove every segment, also those of an earlier run."""
        self.close()
        for path in self._find_segments():
            self._disk.remove(path)
        self._reset()

    def _reset(self) -> None:
        self._segments, self._pending, self._pending_bytes = [], [], 0
        self._number, self._end, self._is_sealed, self._syncing = 0, 1, True, []
        self._recent, self._recent_bytes, self._block = {}, 0, (0, b"")
        self.size = self.live = self._dead = self.torn = 0

    def close(self) -> None:
        """Close the segments; OUTPUT.ahead is closed, and with it unlocked, by who opened it."""
        for segment in self._segments:
            self._close(segment)

    def __repr__(self) -> str:
        return f"<Journal {self.path.name}: {self.live} of {self.size} bytes wait, {len(self._segments)} segments>"


def _base(segment: Segment) -> int:
    return segment.base
