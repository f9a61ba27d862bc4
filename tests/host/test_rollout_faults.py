"""Rollouts that raised, workers that died and tool faults stop a run, unless the recipe tolerates their share."""

from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from verl_credit.errors import IntegrityError
from verl_credit.host.rollout.agent_manager import RolloutWatch, check_rollouts
from verl_credit.turns.rollout.book import NO_TOKEN, RowRecord
from verl_credit.turns.step.step_checks import check_evaluation_faults, check_tool_faults


def test_failed_rollouts_stop_the_run_unless_tolerated():
    assert check_rollouts(8, 8, [], 0.0) == 0
    assert check_rollouts(8, 7, ["KeyError: x"], 0.2) == 1
    with pytest.raises(IntegrityError, match="1 of 8 rollouts raised.*KeyError: x"):
        check_rollouts(8, 7, ["KeyError: x"], 0.0)
    with pytest.raises(IntegrityError, match="no exception was recorded"):
        check_rollouts(8, 6, [], 0.1)


def test_too_many_tool_faults_stop_the_run():
    lost = [RowRecord(tool_fault=code).as_dict() for code in ("connect", "", "", "")]
    assert check_tool_faults(lost, 0.25, "http://x") is None
    with pytest.raises(
        IntegrityError, match=r"1 of 4 rows .*http://\*\*\*@x.*1 connect; .* Is the server up"
    ):
        check_tool_faults(lost, 0.2, "http://me:secret@x")
    with pytest.raises(IntegrityError, match=r"1 of 4 rows .* tools: 1 connect; .*\)\.$"):
        check_tool_faults(lost, 0.2, None)
    aborted = [RowRecord(tool_fault=NO_TOKEN).as_dict()]
    with pytest.raises(IntegrityError, match=r"faults of the engine .*: 1 engine_no_token; .*\)\.$"):
        check_tool_faults(aborted, 0.2, "http://x")


def test_the_cause_that_was_seen_most_is_named_and_a_large_share_is_said():
    other = "http://x: answers from index 'b'; search.index_fingerprint=a"
    seen = [("bad_answer", other)] * 3 + [("bad_answer", "once"), ("connect", "refused"), ("", "")]
    rows = [RowRecord(tool_fault=code, fault_detail=detail).as_dict() for code, detail in seen]
    said = check_tool_faults(rows, 0.9, "http://x")
    assert (
        said.startswith("5 of 6 rows were masked out")
        and f"4 bad_answer, 1 connect (most often: {other})" in said
    )
    with pytest.raises(IntegrityError) as stopped:
        check_tool_faults(rows, 0.25, "http://x")
    assert other in str(stopped.value) and "Is the server up" not in str(stopped.value)
    hostile = [RowRecord(tool_fault="bad_answer", fault_detail="no\npages \x1b[31m").as_dict()]
    assert "(most often: no pages \\x1b[31m)" in check_tool_faults(hostile, 1, "http://x")
    theirs = [{"tool_fault": "sandbox"}]  # a record of an agent loop of one's own
    assert check_tool_faults(theirs, 1, None).startswith(
        "1 of 1 rows were masked out after faults of tools: 1 sandbox;"
    )


def test_an_evaluation_without_its_retriever_is_no_evaluation():
    metrics = {"val-aux/lab-greedy/tool_fault/mean@1": 0.5, "val-aux/lab-greedy/em/mean@1": 0.1}
    check_evaluation_faults(metrics, 0.5, "http://x")
    with pytest.raises(IntegrityError, match="held-out evaluation.*= 0.500"):
        check_evaluation_faults(metrics, 0.25, "http://x")


class Buffer:
    """verl's replay buffer as the watch sees it."""

    def _wait_for_next_poll(self, *args):
        return args

    def sample(self, error=None, keys=("a",)):
        if error:
            raise error
        self.waited = self._wait_for_next_poll("train", 0.0)
        return SimpleNamespace(keys=list(keys)), {}


@pytest.mark.parametrize(
    "left",
    [
        {"error": RuntimeError("no materializable trajectories")},  # verl's advice is about refilling
        {"error": ValueError("Received an empty list as keys.")},
        {"keys": ()},
    ],
)
def test_a_batch_that_failed_as_a_whole_has_the_cause_of_its_rollouts(left):
    buffer, watch = Buffer(), RolloutWatch(0.0)
    watch.drain = lambda: []
    watch.attach(buffer)
    watch.begin(8)
    buffer.sample()
    assert buffer.waited == ("train", 0.0)
    watch.drain = lambda: ["ActorDiedError: the rollout server"]  # between two looks
    with pytest.raises(IntegrityError, match="the rollout server"):
        buffer.sample(**left)


def test_an_error_of_a_rollout_ends_the_trainers_wait():
    buffer, watch = Buffer(), RolloutWatch(0.0, every_s=0.0)
    watch.attach(buffer)
    watch.begin(8)
    watch.drain = lambda: ["KeyError: x"]
    with pytest.raises(IntegrityError, match="KeyError: x"):
        buffer.sample()


def test_tolerated_errors_are_counted_and_a_dead_worker_is_not_tolerated():
    watch = RolloutWatch(0.25)
    watch.begin(8)
    watch.drain = lambda: ["KeyError: x"]
    assert watch.settle(7) == 1

    def dead():
        raise RayActorError

    watch.drain = dead
    with pytest.raises(IntegrityError, match="an agent-loop worker died"):
        watch.settle(8)
