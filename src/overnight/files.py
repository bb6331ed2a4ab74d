"""A batch's files: what an earlier run left in them, and the order in which they change hands.

For editors: a crash may come between any two steps here. `begin` and `merge` say what that leaves; whoever reorders
their steps must say it anew.
"""

import contextlib
from array import array
from pathlib import Path
from typing import Any

import msgspec

from .again import copy_failed, merge, merged_path
from .disk import Disk
from .earlier import Earlier, compare_journal, compare_output, refuse_other_settings
from .errors import OutputLost, OutputRefused
from .head import Head, InputFacts, parse_head, refuse_foreign, run_line, to_facts
from .items import read_lines
from .journal import Journal
from .judge import Verdict
from .options import RunOptions
from .output import RowFile
from .records import digest_settings
from .source import Source
from .target import Target


class BatchFiles:
    """Input, output and journal of a batch, locked; `earlier` says what was found in them."""

    def __init__(
        self,
        options: RunOptions,
        settings: dict[str, Any],
        source: Source,
        verdict: Verdict,
        *,
        target: Target,
        journal: Journal,
        disk: Disk,
    ) -> None:
        """Nothing is read yet but the journal's head."""
        self.target = target
        self.journal = journal
        self.source = source
        self.digest = digest_settings(settings)
        self._options = options
        self._settings = settings
        self._verdict = verdict
        self._disk = disk
        data = journal.read_head()
        refuse_foreign(data, journal.path)
        head, accepted, _ = parse_head(data)
        self.earlier = Earlier(verdict.requests, head, accepted)
        self._was_staged = head is not None and head.staged
        if self._was_staged and not source.staged and _is_same(target.stage, Path(source.name)):
            source.staged = target.stage
        self.is_finished = False

    # -- what is there

    def find(self) -> None:
        """Find what an earlier run left, and refuse what does not fit. Raises OutputRefused."""
        earlier, options, target = self.earlier, self._options, self.target
        head = earlier.head
        is_same_input = head is not None and head.input == InputFacts(self._verdict.bytes, self.source.digest)
        is_same = is_same_input and self.digest in earlier.accepted
        if target.is_stream or (options.overwrite and not (is_same and head and head.overwrite)):
            self._forget()
            return
        if head is not None and self.digest not in earlier.accepted and not options.continue_anyway:
            refuse_other_settings(target.name, head, self._settings)
        try:
            self._compare(earlier, is_same_input=is_same_input)
        except OSError as error:
            raise OutputRefused(f"Cannot read what is there of {target.name}: {error}. Nothing was touched") from error
        except OutputRefused:
            if not options.overwrite:
                raise
            self._forget()  # what is there is not what the unfinished run left

    def _forget(self) -> None:
        """Begin anew, as if nothing were there; it goes when the first new row is ready."""
        head = self.earlier.head
        self.earlier = Earlier(self._verdict.requests, None, set())
        self.earlier.is_anew = self.target.has_rows or head is not None

    def _compare(self, earlier: Earlier, *, is_same_input: bool) -> None:
        earlier.accepted.add(self.digest)
        lines, path = read_lines(self.source), self.target.path
        if self.target.has_rows:
            compare_output(path, lines, earlier, accept_settings=self._options.continue_anyway, disk=self._disk)
        if earlier.head is not None:
            earlier.places = self.journal.load(0 if earlier.is_retry else earlier.kept, earlier.accepted)
            earlier.torn_ahead = self.journal.torn
            if not is_same_input and not earlier.is_retry:
                compare_journal(self.journal, lines, earlier, path)

    # -- the order on disk

    def begin(self, file: RowFile, errors: RowFile | None) -> None:
        """Make the files ready for the first new row.

        Of a new batch the head comes before the output. Where an old one is replaced its journal goes first, so that
        none of its rows comes back into the new output; until then it is whole.
        """
        journal, earlier = self.journal, self.earlier
        if earlier.is_anew:
            journal.begin(b"")
            file.open(0)
            file.sync()
            journal.note(self._head_line())
        elif earlier.head is None:
            journal.begin(self._head_line())
            file.open(earlier.size)
        else:
            line = self._head_line()
            if msgspec.json.decode(line, type=Head) != earlier.head:
                journal.note(line)
            file.open(earlier.size)
        journal.note(run_line())
        if not self.target.is_stream:
            self._keep_input()
            self._disk.sync_folder(self.target.path.parent)
        if errors:
            copy_failed(self.target.path if earlier.kept else None, errors, self._disk)

    def begin_again(self) -> None:
        """Make the journal ready for the first new answer of a failed row."""
        self.journal.begin(self._head_line(retry=self._options.retry_errors))
        self.journal.note(run_line())
        self._keep_input()
        self._disk.sync_folder(self.target.path.parent)

    def merge(self, places: "array[int]") -> None:
        """Put the journal's answers in their rows' places, and empty it. Raises OutputLost.

        A crash before the journal is empty lets the next run merge again, with the same outcome.
        """
        path, earlier = self.target.path, self.earlier
        if len(places) > places.count(0):
            merge(path, self.journal, places, self._disk)
        try:
            self.journal.begin(b"")
            earlier.size, earlier.torn = path.stat().st_size if path.exists() else 0, 0
        except OSError as error:
            raise OutputLost(path, error) from error
        earlier.head, earlier.is_retry, earlier.places = None, False, array("Q")

    def copy_errors(self) -> None:
        """Make --error-file anew from the output. Raises OutputLost."""
        errors = self.target.make_errors()
        if errors:
            try:
                copy_failed(self.target.path, errors, self._disk)
                errors.sync()
            except OSError as error:
                raise OutputLost(errors.path, error) from error
            finally:
                errors.close()

    def finish(self) -> None:
        """Every row is on the disk: what only a further run would need goes. Raises OutputLost."""
        try:
            self.journal.remove_rows()
            if not self.target.is_stream:
                self._disk.remove(merged_path(self.target.path))
            if self._was_staged:
                self._disk.remove(self.target.stage)
        except OSError as error:
            raise OutputLost(self.target.path, error) from error
        self.is_finished = True

    def close(self) -> None:
        """Give the input and the lock back."""
        target = self.target
        self.hold_input()
        self.source.close()
        try:
            with contextlib.suppress(OSError):  # what cannot be removed is the next run's to remove
                if target.is_stream:
                    self.journal.remove_rows()
                target.unlock(is_finished=self.is_finished or target.is_stream)
        finally:
            target.unlock(is_finished=False)

    # -- a staged input

    @property
    def keeps_input(self) -> bool:
        """Whether the staged input (`source.staged`) stays for the next run: this one began, and did not complete."""
        target = self.target
        return self.source.staged == target.stage and not target.is_stream and not self.is_finished

    def hold_input(self) -> None:
        """Let the staged input outlive the source where a further run needs it."""
        self.source.keep_staged = self.keeps_input

    def _keep_input(self) -> None:
        """What was staged takes the name under which it is kept; an earlier run's goes."""
        target = self.target
        if self.source.staged == target.staging:
            with contextlib.suppress(PermissionError):  # Windows renames no open file: the next run begins anew
                self._disk.replace(target.staging, target.stage)
                self.source.staged = target.stage
        elif self.earlier.is_anew and self._was_staged and not self.source.staged:
            self._disk.remove(target.stage)

    def _head_line(self, retry: str = "") -> bytes:
        """The journal's first line."""
        before = self.earlier.head
        head = Head(
            input=InputFacts(self._verdict.bytes, self.source.digest),
            settings=self._settings,
            settings_digest=self.digest,
            also=sorted(self.earlier.accepted - {self.digest}),
            overwrite=not retry and (self._options.overwrite or (before is not None and before.overwrite)),
            staged=self.source.staged is not None,
            retry=retry,
            verdict=to_facts(self._verdict),
        )
        return msgspec.json.encode(head)


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
