"""Jobs: results, errors, calls into the main thread, giving up, and being forgotten."""

import sys
import threading
import time

import pytest
import torch

from loaders.engine.job import Abandoned, Job, MainThread


def finish(job: Job[object]) -> None:
    """Poll until the job has ended."""
    until = time.monotonic() + 30
    while not job.poll():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_result_and_calls_in_the_polling_thread() -> None:
    """What the job hands over runs in the thread that polls, in order; the job gets the results."""
    seen: list[int] = []

    def here(number: int) -> int:
        seen.append(number)
        return threading.get_ident()

    job: Job[object] = Job(lambda main: [main.call(lambda n=n: here(n)) for n in range(20)])
    finish(job)
    assert job.result() == [threading.get_ident()] * 20
    assert seen == list(range(20))


def test_jobs_run_without_gradients() -> None:
    """Grad mode is per thread; a job writes into parameters."""
    job: Job[object] = Job(lambda main: torch.is_grad_enabled())
    finish(job)
    assert job.result() is False


def test_errors_of_the_job_and_of_its_calls() -> None:
    """Both come out of `result`; an error in the main thread does not hurt the one who polls."""

    def fail() -> None:
        raise KeyError("there")

    def work(main: MainThread) -> None:
        with pytest.raises(KeyError, match="there"):
            main.call(fail)
        raise ValueError("here")

    job: Job[object] = Job(work)
    finish(job)
    with pytest.raises(ValueError, match="here"):
        job.result()


@pytest.mark.parametrize("in_main", [True, False])
def test_a_job_that_exits_has_no_result(in_main: bool) -> None:
    """SystemExit in either thread is an error of the job, never an answer of None."""

    def leave() -> None:
        raise SystemExit(3)

    job: Job[object] = Job(lambda main: main.call(leave) if in_main else leave())
    finish(job)
    with pytest.raises(RuntimeError, match="SystemExit"):
        job.result()


def test_a_job_that_nobody_polls_ends_by_itself() -> None:
    """It waits for its patience and no longer; what it had queued is not run later."""
    ran: list[bool] = []
    job: Job[object] = Job(lambda main: main.call(lambda: ran.append(True)), patience_s=0.01)
    job._thread.join(30)
    assert job.poll()
    with pytest.raises(Abandoned, match="not polled"):
        job.result()
    assert ran == []


def test_a_job_given_up_ends_at_its_next_step() -> None:
    """Neither its next call nor its check goes through."""
    begun, go_on = threading.Event(), threading.Event()
    reached: list[bool] = []

    def work(main: MainThread) -> None:
        begun.set()
        assert go_on.wait(30)
        with pytest.raises(Abandoned):
            main.call(lambda: reached.append(True))
        main.check()
        reached.append(True)

    job: Job[object] = Job(work)
    assert begun.wait(30)
    job.give_up()
    go_on.set()
    job._thread.join(30)
    with pytest.raises(Abandoned, match="given up"):
        job.result()
    assert reached == []


def test_a_poll_serves_no_longer_than_its_budget() -> None:
    """One call per poll when each uses up the budget, so that steps of the model come in between."""
    ran: list[int] = []
    main = MainThread(30.0)
    threads = [threading.Thread(target=main.call, args=(lambda n=n: ran.append(n),)) for n in range(3)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 30
    while main._queue.qsize() < 3:
        assert time.monotonic() < until
    for count in (1, 2, 3):
        main.serve(budget_s=0.0)
        assert len(ran) == count
    for thread in threads:
        thread.join(30)


def test_many_jobs_at_once() -> None:
    """Jobs do not get each other's results."""
    jobs: list[Job[object]] = [Job(lambda main, n=n: main.call(lambda: n) * 10) for n in range(8)]
    for job in jobs:
        finish(job)
    assert [job.result() for job in jobs] == [n * 10 for n in range(8)]


def test_a_job_hands_over_quickly() -> None:
    """No thread waits long for Python's lock meanwhile: a step of the model takes it at every operation."""
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(0.005)
        job: Job[object] = Job(lambda main: sys.getswitchinterval())
        finish(job)
        found = job.result()
        assert isinstance(found, float) and found < 0.001
    finally:
        sys.setswitchinterval(before)
