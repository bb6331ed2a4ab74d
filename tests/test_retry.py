"""retry: which outcomes get another attempt, and when."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.records import Answer, Failure
from overnight.retry import RETRYABLE_STATUSES, RetryPolicy, is_retryable, next_wait_s

POLICY = RetryPolicy(max_attempts=5, first_wait_s=0.5, max_wait_s=60)


@pytest.mark.parametrize("status", [200, 201, 400, 401, 403, 404, 413, 422, 501])
def test_what_would_be_answered_the_same_again_is_not_retried(status):
    assert not is_retryable(Answer(status, b"{}"))
    assert next_wait_s(POLICY, 1, Answer(status, b"{}", retry_after_s=1), 0.5) is None


@pytest.mark.parametrize("status", sorted(RETRYABLE_STATUSES))
def test_what_may_pass_is_retried(status):
    assert is_retryable(Answer(status, b"{}"))
    assert next_wait_s(POLICY, 1, Answer(status, b"{}"), 0.5) == 0.25


def test_a_failure_says_by_itself_whether_it_may_pass():
    assert next_wait_s(POLICY, 1, Failure("connection_error", "x", retryable=True), 0.5) == 0.25
    assert next_wait_s(POLICY, 1, Failure("connection_error", "x"), 0.5) is None


def test_the_last_attempt_is_the_last():
    busy = Answer(503, b"{}")
    assert next_wait_s(POLICY, 4, busy, 0.5) is not None
    assert next_wait_s(POLICY, 5, busy, 0.5) is None
    assert next_wait_s(RetryPolicy(max_attempts=1), 1, busy, 0.5) is None


def test_the_wait_doubles_up_to_its_bound():
    waits = [next_wait_s(RetryPolicy(max_attempts=99), attempt, Answer(500, b"{}"), 1.0) for attempt in range(1, 12)]
    assert waits == [0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60, 60]


def test_the_wait_is_never_less_than_what_the_engine_asked_for():
    assert next_wait_s(POLICY, 1, Answer(429, b"{}", retry_after_s=7), 0.5) == 7
    assert next_wait_s(POLICY, 1, Failure("connection_error", "x", retryable=True, retry_after_s=7), 0.0) == 7
    assert next_wait_s(POLICY, 4, Answer(429, b"{}", retry_after_s=0.1), 0.9) == 3.6


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
@settings(deadline=None)
def test_every_wait_is_within_its_bounds(attempt, jitter):
    wait = next_wait_s(RetryPolicy(max_attempts=10_001), attempt, Answer(500, b"{}"), jitter)
    assert wait is not None
    assert 0 <= wait <= 60
