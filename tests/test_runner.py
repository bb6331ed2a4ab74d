"""The runner, with the echo engine and small engines that follow a script."""

import asyncio
import contextlib
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.endpoints import ENDPOINTS
from overnight.engines.base import Engine, EngineContext
from overnight.engines.echo import EchoEngine, script
from overnight.errors import EngineLost, OutputLost, RunStopped
from overnight.output import Sink
from overnight.records import Answer, Request, Row, RowKey, problem_row
from overnight.records import Problem as LineProblem
from overnight.retry import RetryPolicy
from overnight.routing import Router
from overnight.runner import Pace, Runner
from overnight.window import NOWHERE, Window

CHAT = "/v1/chat/completions"
KEY = RowKey("0" * 12, "1" * 8)
AT_ONCE = RetryPolicy(first_wait_s=0.001, max_wait_s=0.001)


class Rows(Sink):
    """A sink that keeps rows in memory; it writes a few at a time, as the output does."""

    def __init__(self, window, slice_size=50):
        super().__init__(window)
        self.written = []
        self._waiting = {}
        self._slice = slice_size

    def finish(self, row):
        self._waiting[row.index] = row
        self.window.finish(row.index)

    async def drain(self):
        for _ in range(self._slice):
            if self.window.place(self.window.written) == NOWHERE:
                self.room.set()
                return False
            index = self.window.written
            assert self.window.release() != NOWHERE
            self.written.append(self._waiting.pop(index, index))
        self.room.set()
        return True

    @property
    def ids(self):
        return [row if isinstance(row, int) else row.custom_id for row in self.written]

    @property
    def codes(self):
        return [row.code for row in self.written]


class Scripted(Engine):
    """Answers by a coroutine of the test's own."""

    name = "scripted"
    endpoints = frozenset(ENDPOINTS)
    models = None

    def __init__(self, act, max_inflight=4):
        super().__init__(EngineContext(), None)
        self.max_inflight = max_inflight
        self._act = act

    async def answer(self, request):
        return await self._act(request)


OK = Answer(200, b'{"usage":{"prompt_tokens":1,"completion_tokens":1}}')


def request(index, **facts):
    body = {**script(**facts), "user": f"r{index}"}
    return Request(index, index + 1, f"r{index}", CHAT, CHAT, json.dumps(body).encode(), None, False, "0" * 16)


def requests(count, **facts):
    return [request(index, **facts) for index in range(count)]


def problem(index):
    return problem_row(LineProblem("invalid_json_line", "no JSON", custom_id=f"r{index}"), index, index + 1, "0", KEY)


def make_runner(items, engine, *, max_ahead=None, inflight=None, sink=None, **pace):
    sink = sink or Rows(Window(inflight or engine.max_inflight, max_ahead))
    pace = {"retry": AT_ONCE, **pace}
    router = Router(engine.endpoints, None)
    return Runner(iter(items), engine, sink, router=router, key=KEY, pace=Pace(**pace)), sink


def run(items, engine, **facts):
    """Run requests to their end; the sink comes back."""
    runner, sink = make_runner(items, engine, **facts)
    asyncio.run(asyncio.wait_for(runner.run(), 30))
    return sink


def run_lost(items, engine, error, **facts):
    """Run requests to a failure; the sink and the failure come back."""
    runner, sink = make_runner(items, engine, **facts)

    async def work():
        with pytest.raises(error) as raised:
            await asyncio.wait_for(runner.run(), 30)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return raised.value

    return sink, asyncio.run(work())


def echo(inflight=4):
    from overnight.engines.echo import EchoOptions

    return EchoEngine(EngineContext(), EchoOptions(echo_inflight=inflight))


# -- the bound -----------------------------------------------------------------------------------------------------


def test_as_many_requests_are_in_flight_as_the_window_says_and_never_more():
    engine = echo(5)
    sink = run([request(n, delay=(n * 7 % 11) / 2000) for n in range(120)], engine)
    assert engine.peak == 5
    assert sink.ids == [f"r{n}" for n in range(120)]


def test_a_request_that_finished_is_replaced_before_the_next_one_ends():
    async def work():
        gates = [asyncio.Event() for _ in range(12)]
        started = []

        async def act(request):
            started.append(request.index)
            await gates[request.index].wait()
            return OK

        runner, sink = make_runner(requests(12), Scripted(act, 3))
        task = asyncio.create_task(runner.run())
        await asyncio.sleep(0.02)
        assert started == [0, 1, 2]
        for index in (1, 3, 4, 2):
            gates[index].set()
            await asyncio.sleep(0.02)
            assert len(started) - [gate.is_set() for gate in gates].count(True) == 3
        assert sink.ids == []
        for gate in gates:
            gate.set()
        await task
        assert sink.ids == [f"r{n}" for n in range(12)]

    asyncio.run(work())


def test_a_window_that_bounds_what_is_ahead_starts_nothing_while_the_first_row_is_missing():
    async def work():
        gate, started = asyncio.Event(), []

        async def act(request):
            started.append(request.index)
            if request.index == 0:
                await gate.wait()
            return OK

        runner, sink = make_runner(requests(30), Scripted(act, 2), max_ahead=6)
        task = asyncio.create_task(runner.run())
        await asyncio.sleep(0.05)
        assert started == [0, 1, 2, 3, 4, 5]
        gate.set()
        await task
        assert len(sink.written) == 30

    asyncio.run(work())


# -- order ---------------------------------------------------------------------------------------------------------

FAULTS = [{}, {"status": 400}, {"status": 500, "times": 1}, {"fault": "error"}, {"fault": "invalid"}, {"fault": "nan"}]
FAULTS += [{"fault": "refuse", "times": 2}, {"fault": "refuse"}]


@settings(max_examples=60, deadline=None)
@given(
    facts=st.lists(st.tuples(st.sampled_from(FAULTS), st.sampled_from([0, 0.001, 0.003])), max_size=30),
    bad=st.sets(st.integers(0, 29)),
    earlier=st.sets(st.integers(0, 29)),
    inflight=st.integers(1, 9),
    ahead=st.none() | st.integers(0, 9),
    slice_size=st.integers(1, 5),
)
def test_every_request_gets_one_row_of_its_own_in_the_inputs_order(facts, bad, earlier, inflight, ahead, slice_size):
    items = [request(index, **fault, delay=delay) for index, (fault, delay) in enumerate(facts)]
    items = [problem(item.index) if item.index in bad else item for item in items]
    items = [item.index + 1 if item.index in earlier else item for item in items]
    window = Window(inflight, None if ahead is None else inflight + ahead)
    sink = run(items, echo(inflight), sink=Rows(window, slice_size))
    assert len(sink.written) == len(items)
    for index, (item, row) in enumerate(zip(items, sink.written, strict=True)):
        if isinstance(item, int):
            assert row == index
            continue
        assert row.custom_id == f"r{index}"
        told = row.json()
        assert told["custom_id"] == f"r{index}"
        if row.code == "":
            assert told["response"]["body"]["echo"]["user"] == f"r{index}"
        else:
            assert isinstance(item, Row) or facts[index][0]


# -- what ends the run ---------------------------------------------------------------------------------------------


def test_a_lost_engine_is_raised_as_itself_and_what_was_written_is_a_whole_prefix():
    items = [request(n, delay=n % 4 / 500) for n in range(40)]
    items[17] = request(17, fault="lost")
    sink, error = run_lost(items, echo(4), EngineLost)
    assert type(error) is EngineLost
    assert "scripted by r17" in str(error)
    assert 10 < len(sink.written) <= 17
    assert sink.ids == [f"r{n}" for n in range(len(sink.written))]
    assert set(sink.codes) == {""}


def test_what_finished_in_the_turn_in_which_the_engine_was_lost_is_written():
    async def act(request):
        await asyncio.sleep(0.01)
        if request.index == 2:
            raise EngineLost("scripted", "it fell over")
        return OK

    sink, _ = run_lost(requests(3), Scripted(act, 3), EngineLost)
    assert sink.ids == ["r0", "r1"]


def test_the_first_of_several_failures_is_raised():
    async def act(request):
        with contextlib.suppress(asyncio.CancelledError):  # and then fail too
            await asyncio.sleep(0.01 if request.index == 1 else 30)
        raise EngineLost("scripted", f"by {request.index}")

    _, error = run_lost(requests(3), Scripted(act, 3), EngineLost)
    assert "by 1" in str(error)


def test_a_request_that_the_engine_cancels_by_itself_ends_the_run_with_a_message():
    async def act(request):
        await asyncio.sleep(0)
        if request.index == 3:
            raise asyncio.CancelledError
        return OK

    sink, error = run_lost(requests(9), Scripted(act, 1), EngineLost)
    assert "cancelled the request 'r3' by itself" in str(error)
    assert sink.ids == ["r0", "r1", "r2"]


def test_an_answer_that_an_engine_gives_to_a_cancellation_is_never_written():
    async def act(request):
        if request.index == 1:
            await asyncio.sleep(0.01)
            raise EngineLost("scripted", "gone")
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            return OK

    sink, _ = run_lost(requests(2), Scripted(act, 2), EngineLost)
    assert sink.written == []


def test_a_lost_output_is_raised_as_itself_and_nothing_more_is_written():
    class Full(Rows):
        async def drain(self):
            if len(self.written) >= 5:
                raise OutputLost("answers.jsonl", OSError(28, "No space left on device"))
            return await super().drain()

    sink, error = run_lost(requests(50), echo(4), OutputLost, sink=Full(Window(4), 1))
    assert "No space left" in str(error)
    assert sink.ids == [f"r{n}" for n in range(5)]


def test_a_cancellation_from_outside_leaves_no_task_and_writes_what_had_finished():
    async def work():
        async def act(request):
            if request.index > 2:
                await asyncio.sleep(30)
            return OK

        runner, sink = make_runner(requests(9), Scripted(act, 4))
        task = asyncio.create_task(runner.run())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sink.ids == ["r0", "r1", "r2"]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(work())


@pytest.mark.parametrize(("grace_s", "written"), [(5, 4), (0, 0)])
def test_a_stop_starts_nothing_more_and_lets_what_is_in_flight_finish_within_the_grace(grace_s, written):
    async def work():
        async def act(_):
            await asyncio.sleep(0.1)
            return OK

        runner, sink = make_runner(requests(40), Scripted(act, 4))
        task = asyncio.create_task(runner.run())
        await asyncio.sleep(0.03)
        runner.stop(grace_s)
        with pytest.raises(RunStopped):
            await task
        assert sink.ids == [f"r{n}" for n in range(written)]

    asyncio.run(work())


# -- one request's failures ----------------------------------------------------------------------------------------


def test_an_exception_in_one_request_is_that_requests_row():
    items = [*requests(2), request(2, fault="error"), request(3)]
    sink = run(items, echo())
    assert sink.codes == ["", "", "engine_error", ""]
    assert "RuntimeError: scripted error" in sink.written[2].message


def test_a_timeout_is_a_row_and_the_engines_own_is_the_engines_error():
    async def act(request):
        if request.index == 0:
            await asyncio.sleep(30)
        if request.index == 1:
            raise TimeoutError("the engine's own")
        return OK

    sink = run(requests(3), Scripted(act), timeout_s=0.05, retry=RetryPolicy(max_attempts=1))
    assert sink.codes == ["request_timeout", "engine_error", ""]
    assert "0.05 s" in sink.written[0].message


def test_a_timeout_bounds_one_attempt_and_the_next_may_succeed():
    attempts = []

    async def act(_):
        attempts.append(time.monotonic())
        if len(attempts) == 1:
            await asyncio.sleep(30)
        return OK

    assert run(requests(1), Scripted(act), timeout_s=0.05).codes == [""]
    assert len(attempts) == 2


@pytest.mark.parametrize(("times", "code"), [(1, ""), (2, ""), (3, "http_503")])
def test_attempts_are_bounded_and_the_last_answer_counts(times, code):
    sink = run([request(0, status=503, times=times)], echo())
    assert sink.codes == [code]


def test_a_refusal_of_the_connection_is_tried_again():
    assert run([request(0, fault="refuse", times=2)], echo()).codes == [""]
    assert run([request(0, fault="refuse", times=3)], echo()).codes == ["connection_error"]


def test_what_the_request_did_wrong_is_not_tried_again():
    engine = echo()
    assert run([request(0, status=400, times=1)], engine).codes == ["http_400"]
    assert engine.answered == 1


def test_the_engines_wish_to_wait_is_respected():
    began = time.monotonic()
    assert run([request(0, status=429, times=1, retry_after=0.3)], echo()).codes == [""]
    assert time.monotonic() - began >= 0.3


def test_a_wait_between_attempts_holds_up_no_other_request():
    items = [request(0, status=429, times=1, retry_after=0.4), *[request(n) for n in range(1, 50)]]
    began = time.monotonic()
    sink = run(items, echo(2))
    assert len(sink.written) == 50
    assert time.monotonic() - began < 2


def test_a_request_that_the_router_refuses_never_reaches_the_engine():
    engine = echo()
    streamed = Request(0, 1, "r0", CHAT, CHAT, b'{"stream":true}', None, True, "0" * 16)
    unknown = Request(1, 2, "r1", "/v1/nothing", None, b"{}", None, False, "0" * 16)
    assert run([streamed, unknown], engine).codes == ["http_400", "http_404"]
    assert engine.answered == 0


# -- many rows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["problems", "earlier"])
def test_200_000_rows_that_are_known_already_do_not_starve_the_drain(kind):
    count = 200_000
    known = problem(0)

    class Watching(Rows):
        most = 0

        async def drain(self):
            self.most = max(self.most, self.window.started - self.window.written)
            return await super().drain()

    def items():
        for index in range(count):
            yield index + 1 if kind == "earlier" else Row(index, known.custom_id, known.data, known.code)

    sink = Watching(Window(4), 5000)
    run(items(), echo(4), sink=sink)
    assert len(sink.written) == count
    assert sink.most < 20_000


def test_a_tick_comes_while_requests_run():
    async def work():
        ticks = []
        engine = echo(1)
        sink = Rows(Window(1))
        runner = Runner(
            iter(requests(3, delay=0.05)),
            engine,
            sink,
            router=Router(engine.endpoints, None),
            key=KEY,
            pace=Pace(),
            tick=lambda: ticks.append(len(sink.written)),
            tick_s=0.02,
        )
        await runner.run()
        assert len(ticks) >= 3
        assert repr(runner).startswith("<Runner of <EchoEngine: 0 inflight (peak 1), 3 answered>: <Window 1")

    asyncio.run(work())


def test_no_requests_are_no_rows():
    assert run([], echo()).written == []
