"""What the first pass's verdict means for these options and this engine: refusals, and notes on what is odd. Pure."""

from collections.abc import Iterator

from .endpoints import ENDPOINTS
from .engines.base import Engine
from .errors import BatchInvalid, UsageError
from .judge import Verdict, report_problems
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
    if None not in verdict.models and not any(name in verdict.models for name in served):
        asked = ", ".join(repr(name) for name, _ in verdict.models.most_common(3))
        raise UsageError(
            f"No line of {options.input_file} asks for the model that is served: the lines ask for {asked}, served "
            f"is {', '.join(map(repr, served))}. Serve all lines with it: --ignore-request-model. "
            f"Or give it the name that they ask for: --served-model-name"
        )


def list_notes(verdict: Verdict, options: RunOptions, engine: Engine) -> Iterator[str]:
    """What is odd but runs."""
    if verdict.duplicates:
        repeat = f"{verdict.duplicates:,} lines repeat an earlier custom_id"
        yield f"{repeat}; all run, and their rows follow the input's order"
    if verdict.unknown_keys:
        keys = ", ".join(sorted(verdict.unknown_keys)[:5])
        yield f"Unknown top-level keys are ignored: {keys}"
    if verdict.problem_count:
        yield f"{verdict.problem_count:,} lines are no requests; each gets an error row in its place"
    if engine.any_path:
        return
    for url, count in verdict.endpoints.items():
        if url not in ENDPOINTS:
            yield f"{count:,} lines ask for {url}, which is no endpoint: each gets a 404 row"
        elif url not in engine.endpoints:
            yield f"{count:,} lines ask for {url}, which {options.engine} does not serve: each gets a 400 row"
    unserved = sum(count for name, count in verdict.models.items() if name and name not in (engine.models or (name,)))
    if unserved and not options.ignore_request_model:
        yield f"{unserved:,} lines ask for a model that is not served: each gets a 404 row"
