"""Is another attempt worth it, and after how long? Pure: nothing here waits, or reads a clock."""

from dataclasses import dataclass

from .records import Answer, Failure

# A server that says one of these may answer the same request later. 501 says that it never will.
RETRYABLE_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 507, 508, 520, 521, 522, 523, 524, 529})


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How many attempts a request gets, and the bounds of the wait between two, in seconds."""

    max_attempts: int = 3
    first_wait_s: float = 0.5
    max_wait_s: float = 60.0


def is_retryable(outcome: Answer | Failure) -> bool:
    """Whether the same request may fare better at another attempt."""
    if isinstance(outcome, Failure):
        return outcome.retryable
    return outcome.status in RETRYABLE_STATUSES


def next_wait_s(policy: RetryPolicy, attempt: int, outcome: Answer | Failure, jitter: float) -> float | None:
    """Seconds until the next attempt; None when there should be none.

    `attempt` is the one that just ended, from 1; `jitter` a random number in [0, 1). The wait is exponential
    with full jitter (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/), but never
    less than what the engine asked for.
    """
    if attempt >= policy.max_attempts or not is_retryable(outcome):
        return None
    wait = min(policy.max_wait_s, policy.first_wait_s * 2.0 ** min(attempt - 1, 30)) * jitter
    return max(wait, outcome.retry_after_s or 0.0)
