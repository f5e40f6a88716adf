"""Session and worker on a made-up rank: phases, versions, failures, readers, and answers that never raise.

Marked `vllm`, since these modules import vLLM, which takes seconds; no engine is started.
"""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loaders.engine.failpoints import Failpoints, Injected
from loaders.engine.hands import Hands
from loaders.engine.job import Abandoned, MainThread
from loaders.engine.spot import identity
from schemas.bridge import CommitRequest, PrepareRequest, ReadRequest, ReadTensor
from schemas.dtypes import Dtype
from schemas.problems import Code, ProblemError
from tests.loaders.engine.atlases import Body, Hand, Place, simple

pytestmark = pytest.mark.vllm

MAIN = MainThread(30.0)


class NoRebuilds:
    """A rebuilder of a rank without handles."""

    def ensure_shards(self, touched: Any, main: Any) -> None:
        return

    def spare_nbytes(self, touched: Any) -> int:
        return 0

    def spares(self, moves: Any, touched: Any, main: Any) -> list[Any]:
        return []


def make(hand: Any, rank: int = 0, rebuilder: Any = None) -> Any:
    """A session without an engine: everything but its atlas and rebuilder is real."""
    from loaders.engine.digests import Digests, Touched
    from loaders.engine.past import Past
    from loaders.engine.room import Room
    from loaders.engine.session import Session

    session = Session.__new__(Session)
    closures = hand.atlas.closures.values()
    session.rank, session.boot, session.version = rank, "boot", 0
    session.atlas = hand.atlas
    session._site_of = {target: site for site in hand.sites.values() for target, _ in site.places()}  # type: ignore[misc]
    session._derived_in = {c.target(path): c.name for c in closures for path in c.kind.derived}
    session._rebuilder = rebuilder or NoRebuilds()
    session._touched = Touched()
    session._digests = Digests(session.atlas, None, session._touched)  # type: ignore[arg-type]
    session._failpoints = Failpoints(rank)
    session._hands = Hands()
    session._room = Room()
    session._past = Past(session._site_of)
    session._prepared, session._applied = {}, None
    session._reading = threading.Lock()
    return session


@pytest.fixture
def hand() -> Hand:
    return simple()


@pytest.fixture
def session(hand: Hand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("GRAFT_FAILPOINTS", str(tmp_path))
    return make(hand)


def prepare(session: Any, folder: Path, value: float, key: str = "k", **options: Any) -> Any:
    uploads: tuple[Any, ...] = options.pop("uploads", ())
    if "restore" not in options and not uploads:
        body = Body(folder / f"body-{key}")
        body.write("w", torch.full((2,), value), torch.tensor([1, 5]))
        uploads = (body.staged(),)
    base = options.pop("base", session.version)
    request = PrepareRequest(nonce="n", key=key, base_version=base, uploads=uploads, timeout_s=1.0, **options)
    return session.prepare(request, MAIN)


def apply(session: Any, version: int, key: str = "k") -> Any:
    return session.apply(CommitRequest(nonce="n", key=key, version=version))


def commit(session: Any, folder: Path, value: float, **options: Any) -> None:
    prepare(session, folder, value, **options)
    apply(session, session.version + 1)
    session.settle("k")


def refusal(function: Any, *arguments: Any, **options: Any) -> Code:
    with pytest.raises(ProblemError) as refused:
        function(*arguments, **options)
    return refused.value.code


def test_commits_and_rollbacks_to_any_version(session: Any, hand: Hand, tmp_path: Path) -> None:
    """Each version is brought back bit for bit, in any order; the undo of a rollback is held too."""
    flat = hand.targets["p"]
    address, history = flat.data_ptr(), [flat.clone()]
    for value in (1.0, 2.0, 3.0):
        commit(session, tmp_path, value)
        history.append(flat.clone())
    for wanted in (1, 3, 0, 2, 6, 0):
        commit(session, tmp_path, 0.0, restore=wanted)
        assert torch.equal(flat, history[wanted])
        history.append(flat.clone())
    assert flat.data_ptr() == address
    state = session.state()
    assert state.version == 9 and state.prepared == () and state.prepared_nbytes == 0
    # Three commits of 8 bytes at 8 bytes of positions: however often crossed, undo holds each place once.
    assert max(state.undo.values()) == 48 and state.undo_nbytes == sum(state.undo.values())


def test_what_is_held_and_forgotten(session: Any, tmp_path: Path) -> None:
    """A version behind a forgotten one is refused, as are versions to come; forgetting twice is nothing."""
    for value in (1.0, 2.0):
        commit(session, tmp_path, value)
    session.forget((1, 99))
    session.forget((1,))
    assert refusal(prepare, session, tmp_path, 0.0, restore=0) is Code.VERSION_NOT_HELD
    assert refusal(prepare, session, tmp_path, 0.0, restore=5) is Code.VERSION_NOT_HELD
    commit(session, tmp_path, 0.0, restore=1)
    assert session.version == 3


def test_prepared_work_is_bound_to_its_version(session: Any, hand: Hand, tmp_path: Path) -> None:
    """A commit in between makes it stale; what was never prepared, or settled, is refused too."""
    prepare(session, tmp_path, 1.0, key="old")
    commit(session, tmp_path, 2.0)
    before = hand.targets["p"].clone()
    assert refusal(apply, session, 2, key="old") is Code.VERSION_MOVED
    assert refusal(apply, session, 2, key="never") is Code.VERSION_MOVED
    assert refusal(apply, session, 2, key="k") is Code.VERSION_MOVED
    assert refusal(prepare, session, tmp_path, 1.0, base=0) is Code.VERSION_MOVED
    assert torch.equal(hand.targets["p"], before)


def test_tied_tensors_are_rolled_back(session: Any, hand: Hand, tmp_path: Path) -> None:
    """The undo of each name of one memory leads back by itself, over several versions too."""
    from loaders.engine.ties import live_ties

    hand.add_tensor("head", (4, 3), Dtype.F32)
    stand_in = torch.empty(4, 3)
    hand.add_region("head", "q", stand_in, stand_in, torch.float32)
    hand.sites["q"] = Place("q", (4, 3), (("q", identity("q", 12)),))
    hand.targets["q"] = hand.targets["p"]
    for name, site in hand.sites.items():
        site.source = name  # type: ignore[attr-defined]
        session._site_of[name] = site
    session.atlas.ties = live_ties(hand.sites, hand.targets)  # type: ignore[arg-type]
    session.atlas.into = {"p": hand.regions["w"], "q": hand.regions["head"]}
    history = [hand.targets["p"].clone()]
    for value in (1.0, 2.0):
        body = Body(tmp_path / f"body-{value}")
        for tensor in ("w", "head"):
            body.write(tensor, torch.full((2,), value), torch.tensor([1, 5]))
        request = PrepareRequest(
            nonce="n", key="k", base_version=session.version, uploads=(body.staged(),), timeout_s=1.0
        )
        session.prepare(request, MAIN)
        apply(session, session.version + 1)
        session.settle("k")
        history.append(hand.targets["p"].clone())
    for wanted in (1, 0, 2):
        commit(session, tmp_path, 0.0, restore=wanted)
        assert torch.equal(hand.targets["p"], history[wanted])


def test_a_prepare_that_saw_an_undone_commit_is_stale(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version is as it was, but what was read meanwhile is of no version."""

    def come_and_go(*args: Any) -> list[Any]:
        monkeypatch.undo()
        apply(session, 1, key="other")
        session.undo("other")
        return []

    prepare(session, tmp_path, 1.0, key="other")
    monkeypatch.setattr(session._rebuilder, "spares", come_and_go)
    assert refusal(prepare, session, tmp_path, 2.0) is Code.VERSION_MOVED
    assert session.version == 0 and session.state().prepared == ("other",)


def test_undo_is_ready_before_the_commit(session: Any, hand: Hand, tmp_path: Path) -> None:
    """A commit that came and was undone after the prepare leaves its undo right; it is counted as held."""
    commit(session, tmp_path, 3.0)
    before = hand.targets["p"].clone()
    prepare(session, tmp_path, 1.0)
    prepare(session, tmp_path, 2.0, key="other")
    # Two elements each: 8 bytes to write, 8 of positions, 8 to put back.
    assert session.state().prepared_nbytes == 2 * (8 + 8 + 8)
    apply(session, 2, key="other")
    session.undo("other")
    apply(session, 2)
    session.settle("k")
    commit(session, tmp_path, 0.0, restore=1)
    assert torch.equal(hand.targets["p"], before)


@pytest.mark.parametrize("point", ["apply.before", "apply.middle", "apply.after"])
def test_a_failed_apply_leaves_nothing(session: Any, hand: Hand, tmp_path: Path, point: str) -> None:
    """Weights, version and undo are as before, and the same prepared work can be applied then."""
    prepare(session, tmp_path, 1.0)
    (tmp_path / point).touch()
    with pytest.raises(Injected):
        apply(session, 1)
    assert not hand.targets["p"].any()
    assert session.version == 0 and session.state().undo == {}
    session.undo("k")
    apply(session, 1)
    assert hand.targets["p"].sum() == 2


def test_undo_takes_back_only_the_last_apply_of_its_key(session: Any, hand: Hand, tmp_path: Path) -> None:
    """A rank that did not apply, or has settled, has nothing to undo; undoing twice is nothing."""
    commit(session, tmp_path, 1.0)
    session.undo("k")
    assert session.version == 1
    prepare(session, tmp_path, 2.0, key="next")
    apply(session, 2, key="next")
    session.undo("k")
    assert session.version == 2
    for _ in range(2):
        session.undo("next")
        assert session.version == 1 and session.state().undo.keys() == {"1"}
        assert hand.targets["p"].sum() == 2


def test_dropping_leaves_a_commit_alone(session: Any, hand: Hand, tmp_path: Path) -> None:
    """Prepared work goes, but what was applied can still be taken back; dropping twice is nothing."""
    prepare(session, tmp_path, 1.0)
    apply(session, 1)
    for _ in range(2):
        session.drop("k")
    assert session.state().prepared == ()
    session.undo("k")
    assert session.version == 0 and not hand.targets["p"].any()


@pytest.mark.parametrize("how", ["apply", "undo"])
def test_a_failed_revert_is_state_unknown(session: Any, tmp_path: Path, how: str) -> None:
    """What could not be put back is said to be unknown."""
    from loaders.engine.session import StateUnknown

    prepare(session, tmp_path, 1.0)
    if how == "apply":
        (tmp_path / "apply.after").touch()
    else:
        apply(session, 1)
    (tmp_path / "revert").touch()
    with pytest.raises(StateUnknown, match="could not put back"):
        apply(session, 1) if how == "apply" else session.undo("k")


def test_undo_is_taken_only_if_there_is_room(session: Any, tmp_path: Path) -> None:
    """Two elements need 8 bytes at 8 bytes of positions; with one byte less nothing is held."""
    assert refusal(prepare, session, tmp_path, 1.0, undo_most=15) is Code.UNDO_BUDGET
    assert session.state().prepared == ()
    assert prepare(session, tmp_path, 1.0, undo_most=16).undo_nbytes == 16


def test_a_replay(session: Any, hand: Hand, tmp_path: Path) -> None:
    """No memory is taken to step back from it, which is refused; later commits can be undone up to it."""
    report = prepare(session, tmp_path, 1.0, replay=True)
    assert (report.nbytes, report.undo_nbytes, report.digest) == (8, 0, None)
    without = session.state().prepared_nbytes
    prepare(session, tmp_path, 1.0, key="with")
    assert session.state().prepared_nbytes - without == without + report.nbytes
    apply(session, 4)
    session.settle("k")
    kept = hand.targets["p"].clone()
    assert session.state().undo == {} and session.version == 4
    assert refusal(prepare, session, tmp_path, 0.0, restore=3) is Code.VERSION_NOT_HELD
    commit(session, tmp_path, 2.0)
    commit(session, tmp_path, 0.0, restore=4)
    assert torch.equal(hand.targets["p"], kept)


@pytest.mark.parametrize("how", ["apply", "undo"])
def test_a_replay_that_fails_is_state_unknown(session: Any, tmp_path: Path, how: str) -> None:
    """Nothing was kept to put back, here or when another rank has failed."""
    from loaders.engine.session import StateUnknown

    prepare(session, tmp_path, 1.0, replay=True)
    if how == "apply":
        (tmp_path / "apply.middle").touch()
    else:
        apply(session, 1)
    with pytest.raises(StateUnknown, match="prepared without undo"):
        apply(session, 1) if how == "apply" else session.undo("k")


def test_a_prepare_that_was_given_up_leaves_nothing(session: Any, tmp_path: Path) -> None:
    """Nobody would ever drop it."""
    body = Body(tmp_path / "body")
    body.write("w", torch.ones(4, 3))
    main = MainThread(1.0)
    main.give_up()
    request = PrepareRequest(nonce="n", key="k", base_version=0, uploads=(body.staged(),), timeout_s=1.0)
    with pytest.raises(Abandoned):
        session.prepare(request, main)
    assert session.state().prepared == ()


def test_digests_follow_the_weights_alone(session: Any, tmp_path: Path) -> None:
    """They change with a commit, come back with its rollback, and carry the version they are of."""

    def digest() -> tuple[int, str]:
        version, found = session.digests("", MAIN)
        return version, found.tensors[0].blake3

    first = digest()
    commit(session, tmp_path, 1.0)
    second = digest()
    assert (first[0], second[0]) == (0, 1) and first[1] != second[1]
    commit(session, tmp_path, 1.0)
    assert digest() == (2, second[1])
    commit(session, tmp_path, 0.0, restore=0)
    assert digest() == (3, first[1])
    prepare(session, tmp_path, 7.0)
    (tmp_path / "apply.after").touch()
    with pytest.raises(Injected):
        apply(session, 4)
    assert digest() == (3, first[1])


def test_a_shard_that_comes_while_digests_are_taken(
    session: Any, hand: Hand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Targets may be added in the main thread; these digests are of those that were there."""
    taken = session._digests._tensor

    def tensor(name: str) -> str:
        hand.targets["p@shard"] = torch.zeros(12)
        digest: str = taken(name)
        return digest

    monkeypatch.setattr(session._digests, "_tensor", tensor)
    hand.targets["q"] = torch.zeros(3)
    assert [one.name for one in session.digests("", MAIN)[1].tensors] == ["p", "q"]


def test_readers_never_see_a_commit_that_may_be_undone(session: Any, hand: Hand, tmp_path: Path) -> None:
    """A read that begins after an apply waits until that is settled or undone."""
    prepare(session, tmp_path, 1.0)
    apply(session, 1)
    request = ReadRequest(nonce="n", path=str(tmp_path / "out"), tensors=(ReadTensor(name="w", tensor="w"),))
    results: list[Any] = []
    reader = threading.Thread(target=lambda: results.append(session.read(request, MAIN)))
    reader.start()
    reader.join(0.1)
    assert results == []
    session.undo("k")
    reader.join(30)
    assert results[0].version == 0
    assert not any((tmp_path / "out").read_bytes()[-48:])


def test_readers_wait_while_weights_are_written(session: Any, tmp_path: Path) -> None:
    """A look that would begin and end within one write is not taken."""
    prepare(session, tmp_path, 1.0)
    seen: list[Any] = []
    reader = threading.Thread(target=lambda: seen.append(session._of_one_version(lambda: None)))
    with session._writing(session._prepared["k"]):
        reader.start()
        reader.join(0.1)
        assert seen == []
    reader.join(30)
    assert seen == [(0, None)]


def test_readers_never_mix_versions(session: Any, hand: Hand, tmp_path: Path) -> None:
    """While commits and undone commits come one after the other, every answer holds one version's weights.

    Version n holds the value n in every element that it writes.
    """
    stop = threading.Event()
    failures: list[str] = []
    seen: set[int] = set()

    def look() -> tuple[float, float]:
        first = float(hand.targets["p"][1])
        time.sleep(0.0002)
        return first, float(hand.targets["p"][5])

    def watch() -> None:
        while not stop.is_set():
            try:
                version, (a, b) = session._of_one_version(look)
            except ProblemError as error:
                if error.code is not Code.BUSY:
                    failures.append(str(error))
                continue
            seen.add(version)
            if not version == a == b:
                failures.append(f"{version}: {a}, {b}")

    watchers = [threading.Thread(target=watch) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    for number in range(60):
        prepare(session, tmp_path, float(session.version + 1))
        apply(session, session.version + 1)
        if number % 3 == 0:
            session.undo("k")
        session.settle("k")
        time.sleep(0.001)
    stop.set()
    for watcher in watchers:
        watcher.join(30)
    assert failures == [] and len(seen) > 3


# -- the worker extension --------------------------------------------------------------


@pytest.fixture
def worker(session: Any) -> Iterator[Any]:
    from loaders.engine.worker import GraftWorker

    worker: Any = GraftWorker()
    worker.rank, worker.graft_session, worker.graft_jobs = 0, session, {}
    yield worker


def job(worker: Any, start: str) -> dict[str, Any]:
    begun = json.loads(start)
    assert begun["error"] is None
    until = time.monotonic() + 30
    while True:
        answer: dict[str, Any] = json.loads(worker.graft_poll("p", begun["nonce"]))
        assert answer["nonce"] == "p"
        if not answer["pending"]:
            return answer
        assert time.monotonic() < until


def request(tmp_path: Path, **changes: Any) -> str:
    body = Body(tmp_path / "body")
    body.write("w", torch.ones(4, 3))
    made = PrepareRequest(nonce="n", key="k", base_version=0, uploads=(body.staged(),), timeout_s=1.0)
    return made.model_copy(update=changes).model_dump_json()


def test_a_commit_by_rpc(worker: Any, tmp_path: Path) -> None:
    """Prepare as a job, apply, settle, state: JSON both ways, with the caller's nonce."""
    report = job(worker, worker.graft_start_prepare("a", request(tmp_path)))["value"]
    assert report["ok"] and report["elements"] == 12 and worker.graft_jobs == {}
    applied = json.loads(
        worker.graft_apply("b", CommitRequest(nonce="b", key="k", version=1).model_dump_json())
    )
    assert (
        applied["nonce"] == "b"
        and applied["error"] is None
        and applied["value"]["digest"] == report["digest"]
    )
    assert json.loads(worker.graft_settle("c", "k"))["error"] is None
    state = json.loads(worker.graft_state("d"))["value"]
    assert int(state["version"]) == 1 and state["prepared"] == []


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("graft_apply", ("{",)),
        ("graft_apply", ('{"nonce": "x", "key": "never", "version": 1}',)),
        ("graft_forget", ("null",)),
        ("graft_poll", ("no such job",)),
    ],
)
def test_bad_requests_are_answers(worker: Any, method: str, arguments: tuple[str, ...]) -> None:
    """Nothing leaves an RPC as an exception."""
    answer = json.loads(getattr(worker, method)("mine", *arguments))
    assert answer["nonce"] == "mine" and answer["error"]["code"]


def test_a_job_that_fails_is_an_answer(worker: Any, tmp_path: Path) -> None:
    """Its refusal keeps its code; the job is gone after it was told."""
    answer = job(worker, worker.graft_start_prepare("a", request(tmp_path, base_version=5)))
    assert answer["error"]["code"] == "version_moved"
    bad = job(worker, worker.graft_start_prepare("b", "{"))
    assert bad["error"]["code"] == "internal" and worker.graft_jobs == {}


def test_a_job_given_up_is_forgotten(worker: Any, tmp_path: Path) -> None:
    """Giving up drops it, twice is nothing, and polling it then is an error and no exception."""
    worker.graft_start_prepare("a", request(tmp_path))
    for nonce in ("b", "c"):
        assert json.loads(worker.graft_give_up(nonce, "a"))["error"] is None
    assert json.loads(worker.graft_poll("d", "a"))["error"]["code"] == "internal"


def test_unknown_is_for_ever(worker: Any, tmp_path: Path) -> None:
    """After a revert that failed, every later call says that the state is unknown."""
    job(worker, worker.graft_start_prepare("a", request(tmp_path)))
    for point in ("apply.after", "revert"):
        (tmp_path / point).touch()
    commit = CommitRequest(nonce="b", key="k", version=1).model_dump_json()
    for call in (
        lambda: worker.graft_apply("b", commit),
        lambda: worker.graft_apply("c", commit),
        lambda: worker.graft_undo("d", "k"),
        lambda: worker.graft_state("e"),
        lambda: worker.graft_start_prepare("f", request(tmp_path)),
    ):
        assert json.loads(call())["error"]["code"] == "state_unknown"


def test_before_it_has_begun(tmp_path: Path) -> None:
    """A worker without a session refuses everything with the reason, and raises nothing.

    Its number counts the ranks of the data-parallel engines before its own.
    """
    from loaders.engine.worker import GraftWorker

    worker: Any = GraftWorker()
    worker.rank = 3
    parallel = SimpleNamespace(data_parallel_index=2, world_size=4)
    worker.vllm_config = SimpleNamespace(parallel_config=parallel)
    for answer in (
        worker.graft_state("n"),
        worker.graft_apply("n", "{}"),
        worker.graft_poll("n", "j"),
        worker.graft_give_up("n", "j"),
        worker.graft_start_prepare("n", request(tmp_path)),
        worker.graft_describe("n"),
    ):
        found = json.loads(answer)
        assert (found["rank"], found["error"]["code"]) == (11, "not_supported")
    begun = json.loads(worker.graft_begin("n"))
    assert begun["error"]["code"] == "internal"
    assert json.loads(worker.graft_state("n"))["error"]["detail"] == begun["error"]["detail"]


def test_spares_change_together_or_not_at_all() -> None:
    """If one handle of a closure does not fit, none is exchanged; twice is nothing."""
    from loaders.engine.rebuild import Spare

    def handle(n: int, pointer: int) -> Any:
        return SimpleNamespace(n=n, k=4, handler_tensor=torch.tensor([pointer]))

    def spare(live: dict[str, Any], fresh: dict[str, Any]) -> Any:
        return Spare(SimpleNamespace(state=SimpleNamespace(handles=live)), fresh)  # type: ignore[arg-type]

    live = {"a": handle(2, 1), "b": handle(3, 2)}
    with pytest.raises(ValueError, match="shapes differ"):
        spare(live, {"a": handle(2, 10), "b": handle(4, 20)}).exchange()
    assert [h.handler_tensor.item() for h in live.values()] == [1, 2]
    fits = spare(live, {"a": handle(2, 10), "b": handle(3, 20)})
    fits.exchange()
    assert [h.handler_tensor.item() for h in live.values()] == [10, 20]
    fits.exchange()
    assert [h.handler_tensor.item() for h in live.values()] == [1, 2]
