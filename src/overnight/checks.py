"""What the first pass's verdict means for these options and this engine: refusals, and notes on what is odd. Pure."""

from collections.abc import Iterator

from .endpoints import ENDPOINTS
from .engines.base import Engine
from .errors import BatchInvalid, UsageError
from .judge import OTHERS, Verdict, report_problems, shorten
from .options import RunOptions


def refuse_options(options: RunOptions, *, is_stream: bool) -> None:
    """Refuse options that cannot work together. Raises UsageError."""
    for name in ("input_file", "output_file"):
        if not getattr(options, name):
            raise UsageError(f"--{name.replace('_', '-')} is needed: overnight run -i requests.jsonl -o answers.jsonl")
    if options.retry_errors:
        for name in ("overwrite", "expire"):
            if getattr(options, name):
                raise UsageError(f"--retry-errors and --{name} cannot work together: one of them")
    if is_stream:
        for name in ("retry_errors", "expire"):
            if getattr(options, name):
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} goes on from an output that is there; {options.output_file} is no file")


def refuse_batch(verdict: Verdict, options: RunOptions, engine: Engine) -> None:
    """Refuse what can be seen to be wrong before the model loads. Raises BatchInvalid, UsageError."""
    if verdict.problem_count and options.on_invalid == "fail":
        report = report_problems(verdict, options.input_file)
        raise BatchInvalid(options.input_file, report, verdict.problem_count)
    served = engine.models
    if served is None or options.ignore_request_model or not verdict.models:
        return
    # Names are kept shortened, and beyond a thousand not at all.
    may_be_asked = {None, OTHERS, *map(shorten, served)}
    if not may_be_asked & verdict.models.keys():
        asked = ", ".join(repr(name) for name, _ in verdict.models.most_common(3))
        raise UsageError(
            f"No line of {options.input_file} asks for the model that is served: the lines ask for {asked}, served "
            f"is {', '.join(map(repr, served))}. Serve all lines with it: --ignore-request-model. "
            f"Or give it the name that they ask for: --served-model-name"
        )


def list_notes(verdict: Verdict, options: RunOptions, engine: Engine) -> Iterator[str]:
    """What is odd but runs."""
    if verdict.duplicates:
        repeat = _lines(verdict.duplicates, "repeats", "repeat")
        yield f"{repeat} an earlier custom_id; all run, and their rows follow the input's order"
    if verdict.unknown_keys:
        keys = ", ".join(map(repr, sorted(verdict.unknown_keys)[:5]))
        yield f"Unknown top-level keys are ignored: {keys}"
    if verdict.problem_count:
        bad = _lines(verdict.problem_count, "is no request", "are no requests")
        yield f"{bad}; each gets an error row in its place"
    if engine.any_path:
        return
    for url, count in verdict.endpoints.items():
        ask = _lines(count, "asks", "ask")
        if url not in ENDPOINTS:
            yield f"{ask} for {url!r}, which is no endpoint: each gets a 404 row"
        elif url not in engine.endpoints:
            yield f"{ask} for {url}, which {options.engine} does not serve: each gets a 400 row"
    served = engine.models
    if served is None or options.ignore_request_model:
        return
    known = {None, OTHERS, *map(shorten, served)}
    unserved = sum(count for name, count in verdict.models.items() if name not in known)
    if unserved:
        yield f"{_lines(unserved, 'asks', 'ask')} for a model that is not served: each gets a 404 row"


def _lines(count: int, does: str, do: str) -> str:
    """A count of lines and what they do, in the right number."""
    return f"{count:,} line {does}" if count == 1 else f"{count:,} lines {do}"
