"""staffing: who does what, and which workers to submit: a table. Whole runs are in
tests/executors/test_worker_jobs.py, and in the simulator."""

from dataclasses import replace

from pipeline.decide.crew import Crew, Pending, Worker, failed_claims, held_tasks
from pipeline.decide.places import Need
from pipeline.decide.situation import Estimate, Foreign, Situation, WorkerRequest
from pipeline.decide.staffing import staff
from pipeline.run.plan import Plan
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.workers.beats import Doing
from pipeline.workers.claims import Claim
from pipeline.workers.outside import attempt_ids
from slurm.nodes import Node
from slurm.ringing import parse_worker

PLAN = Plan(iterations=3, num_shards=4, evaluate_every=0)
ROLLOUTS = [Task(1, Stage.ROLLOUT, shard) for shard in range(4)]
NEXT_ROLLOUTS = [Task(2, Stage.ROLLOUT, shard) for shard in range(4)]
UPDATE = Task(1, Stage.UPDATE)


class Attempts(dict):
    """What gives attempts their ids, by worker: the same as in a real one."""

    def __missing__(self, worker: str):
        name = parse_worker(worker)
        return self.setdefault(worker, attempt_ids(name.array, str(name.index), name.restart))


ATTEMPTS = Attempts()


def claim(task: Task, worker: str, number: int = 1, time: float = 10.0) -> Claim:
    return Claim(task, number, ATTEMPTS[worker](number), worker, time)


def busy(name: str, task: Task, since: float = 10.0) -> Worker:
    return Worker(name, task, Doing.BUSY, task, since)


def waiting(name: str, task: Task) -> Worker:
    return Worker(name, task, Doing.WAITING, None, 20.0)


def decide(workers=(), pending=(), claims=(), committed=(PREPARE,), ready=(), wanted=4, **more):
    crew = Crew(tuple(workers), tuple(pending))
    held = held_tasks(claims, crew, committed)
    ready = [task for task in ready if task not in held]
    number = wanted if isinstance(wanted, dict) else {"rollout": wanted}
    tasks = [task for task in PLAN.all_tasks() if task.iteration <= 2]
    places = more.pop("places", {})
    needs = {kind: Need(frozenset(partitions), gpus=1) for kind, partitions in places.items()}
    more = {"needs": needs, "early": more.get("estimates", {}).keys(), **more}
    return staff(Situation(PLAN, tasks, crew, held, committed, ready, number, more.pop("now", 100.0), **more))


def leaving(decided):
    """Who makes place for whom."""
    return {one.worker: one.whom for one in decided.end_idle}


# --- who holds what ---


def test_a_task_is_held_by_the_worker_that_is_at_it():
    crew = Crew((busy("7_0r0", ROLLOUTS[0]),))
    assert held_tasks([claim(ROLLOUTS[0], "7_0r0")], crew, {PREPARE}) == {ROLLOUTS[0]: "7_0r0"}


def test_a_claim_of_a_worker_that_is_gone_or_went_on_holds_nothing_and_has_failed():
    crew = Crew((waiting("7_0r0", ROLLOUTS[0]),))
    claims = [claim(ROLLOUTS[0], "7_0r0"), claim(ROLLOUTS[1], "7_1r0")]
    assert held_tasks(claims, crew, {PREPARE}) == {}
    assert failed_claims(claims, crew, {PREPARE}, set()) == claims
    assert failed_claims(claims, crew, {PREPARE, ROLLOUTS[0]}, {claims[1].attempt}) == []


def test_of_attempts_at_a_task_that_is_done_those_failed_that_broke_and_are_over():
    crew = Crew((busy("7_0r0", ROLLOUTS[0]),))
    claims = [claim(ROLLOUTS[0], "7_0r0"), claim(ROLLOUTS[0], "7_1r0", 2), claim(ROLLOUTS[0], "7_2r0", 3)]
    broken = {claims[0].attempt, claims[1].attempt}
    assert failed_claims(claims, crew, {ROLLOUTS[0]}, set(), broken) == [claims[1]], (
        "the first is still at it"
    )
    assert failed_claims(claims, crew, {ROLLOUTS[0]}, {claims[1].attempt}, broken) == []


def test_a_task_that_failed_and_was_taken_again_by_the_same_worker_is_held_and_failed_once():
    crew = Crew((busy("7_0r0", ROLLOUTS[0], since=30.0),))
    claims = [claim(ROLLOUTS[0], "7_0r0"), claim(ROLLOUTS[0], "7_0r0", 2, 30.0)]
    assert held_tasks(claims, crew, set()) == {ROLLOUTS[0]: "7_0r0"}
    assert failed_claims(claims, crew, set(), set()) == claims[:1]


def test_a_worker_that_failed_at_one_task_and_is_at_another_has_failed_at_the_first():
    ATTEMPTS.clear()
    claims = [claim(ROLLOUTS[0], "7_0r0"), claim(ROLLOUTS[1], "7_0r0", time=20.0)]
    crew = Crew((busy("7_0r0", ROLLOUTS[1], since=20.0),))
    assert failed_claims(claims, crew, {PREPARE}, set()) == claims[:1]
    gone = failed_claims(claims, Crew(), {PREPARE}, {claims[0].attempt})
    assert gone == claims[1:], "that one was judged is no word on the other"


def test_a_claim_that_is_newer_than_the_beat_counts():
    crew = Crew((waiting("7_0r0", ROLLOUTS[0]),))
    assert ROLLOUTS[1] in held_tasks([claim(ROLLOUTS[1], "7_0r0", time=21.0)], crew, set())


def test_an_element_that_waits_or_starts_holds_its_first_task_unless_somebody_took_it():
    crew = Crew((Worker("7_0r0", ROLLOUTS[0]), busy("6_0r0", ROLLOUTS[1])), (Pending("7_1", ROLLOUTS[1]),))
    held = held_tasks([claim(ROLLOUTS[1], "6_0r0")], crew, {PREPARE})
    assert held == {ROLLOUTS[0]: "7_0r0", ROLLOUTS[1]: "6_0r0"}


def test_an_update_that_writes_its_state_is_still_held():
    crew = Crew((busy("7_0r0", UPDATE),))
    assert held_tasks([claim(UPDATE, "7_0r0")], crew, {PREPARE, UPDATE}) == {UPDATE: "7_0r0"}


# --- whom to submit ---


def test_nobody_is_there_so_every_ready_task_gets_an_element_up_to_the_wanted_number():
    assert decide(ready=ROLLOUTS).requests == (WorkerRequest(tuple(ROLLOUTS)),)
    assert decide(ready=ROLLOUTS, wanted=2).requests == (WorkerRequest((ROLLOUTS[2], ROLLOUTS[3])),)


def test_workers_that_wait_take_the_low_shards_and_elements_the_high_ones():
    workers = [waiting("7_0r0", ROLLOUTS[0]), waiting("7_1r0", ROLLOUTS[1])]
    assert decide(workers, ready=ROLLOUTS).requests == (WorkerRequest((ROLLOUTS[2], ROLLOUTS[3])),)
    done = (PREPARE, *ROLLOUTS[2:])
    assert decide(workers, committed=done, ready=ROLLOUTS[:2]).requests == ()


def test_a_task_that_workers_leave_alone_gets_an_element_of_its_own():
    workers = [waiting(f"7_{i}r0", ROLLOUTS[i]) for i in range(3)]
    done = (PREPARE, ROLLOUTS[0], *ROLLOUTS[2:])
    assert decide(workers, committed=done, ready=ROLLOUTS[1:2]).requests == ()
    decided = decide(workers, committed=done, ready=ROLLOUTS[1:2], only_by_pass={ROLLOUTS[1]})
    assert decided.requests == (WorkerRequest((ROLLOUTS[1],)),)


def test_where_each_task_has_a_job_who_is_at_work_will_not_take_what_is_left():
    workers = [busy(f"7_{i}r0", ROLLOUTS[i]) for i in (0, 1)]
    claims = [claim(ROLLOUTS[i], f"7_{i}r0") for i in (0, 1)]
    quick = {"rollout": Estimate(queue_wait=30.0, startup=70.0, task=10.0)}
    given = {"claims": claims, "ready": ROLLOUTS, "estimates": quick, "early": ()}
    assert decide(workers, **given).requests == ()
    assert decide(workers, **given, of_one_task={"rollout"}).requests == (
        WorkerRequest((ROLLOUTS[2], ROLLOUTS[3])),
    )


def test_where_there_is_no_place_an_idle_worker_makes_room_and_no_busy_one():
    idle, at_work = waiting("7_0r0", UPDATE), busy("7_1r0", ROLLOUTS[1])
    claims = [claim(ROLLOUTS[1], "7_1r0")]
    decided = decide([at_work, idle], claims=claims, ready=ROLLOUTS[:1], wanted=2, only_by_pass={ROLLOUTS[0]})
    assert (decided.requests, decided.end_idle) == ((WorkerRequest((ROLLOUTS[0],)),), ())
    first = waiting("7_0r0", ROLLOUTS[0])
    decided = decide(
        [at_work, first], claims=claims, ready=ROLLOUTS[:1], wanted=2, only_by_pass={ROLLOUTS[0]}
    )
    assert (decided.requests, leaving(decided)) == ((WorkerRequest((ROLLOUTS[0],)),), {"7_0r0": "rollout"})
    decided = decide([at_work], claims=claims, ready=ROLLOUTS[:1], wanted=1, only_by_pass={ROLLOUTS[0]})
    assert (decided.requests, decided.end_idle) == ((), ())


def test_a_worker_that_leaves_has_no_place_any_more():
    leaving = replace(waiting("7_0r0", ROLLOUTS[0]), doing=Doing.LEAVING)
    assert decide([leaving], ready=ROLLOUTS[:1], wanted=1).requests == (WorkerRequest((ROLLOUTS[0],)),)


UNTIL_ROLLOUTS = [PREPARE, *ROLLOUTS]


def test_successors_begin_so_that_they_are_ready_when_the_input_is():
    estimates = {"rollout": Estimate(next_input=500.0, queue_wait=30.0, startup=70.0)}
    requests = decide(committed=UNTIL_ROLLOUTS, estimates=estimates).requests
    assert requests == (WorkerRequest(tuple(NEXT_ROLLOUTS), 400.0),)
    assert decide(committed=UNTIL_ROLLOUTS, estimates=estimates, now=450.0).requests[0].begin is None
    assert decide(committed=UNTIL_ROLLOUTS).requests == (), "no job of this stage starts early"
    assert decide(committed=UNTIL_ROLLOUTS, estimates={"rollout": Estimate(500.0)}).requests == ()


def test_a_successor_is_sent_early_once_for_each_task():
    estimates = {"rollout": Estimate(500.0, 30.0, 70.0)}
    requests = decide(
        committed=UNTIL_ROLLOUTS, estimates=estimates, submitted_for=set(NEXT_ROLLOUTS)
    ).requests
    assert requests == ()


def test_rollouts_start_up_beside_prepare():
    requests = decide(committed=(), ready=(PREPARE,), wanted={"prepare": 1, "rollout": 4}).requests
    assert requests == (WorkerRequest((PREPARE,)),)
    early = decide(
        committed=(),
        ready=(PREPARE,),
        wanted={"prepare": 1, "rollout": 4},
        estimates={"prepare": Estimate(), "rollout": Estimate()},
    )
    assert early.requests == (WorkerRequest((PREPARE,)), WorkerRequest(tuple(ROLLOUTS)))


def test_an_element_whose_input_came_early_does_not_wait_for_its_begin_time():
    pending = [Pending("8_0", NEXT_ROLLOUTS[0], 400.0), Pending("8_1", NEXT_ROLLOUTS[1], 50.0)]
    assert decide(pending=pending, committed=UNTIL_ROLLOUTS).start_now == ()
    assert decide(pending=pending, committed=[*UNTIL_ROLLOUTS, UPDATE]).start_now == ("8_0",)


REWARDS = [Task(1, Stage.REWARD, shard) for shard in range(4)]
ONE_PLACE = dict.fromkeys(("rollout", "reward", "update"), ("gpu",))
TWO_EACH = {"rollout": 2, "reward": 2, "update": 1}


def test_an_element_that_has_nothing_to_do_starts_before_nobody_who_has():
    done = [*UNTIL_ROLLOUTS, *REWARDS[:1]]
    late = [Pending("7_1", ROLLOUTS[1]), Pending("8_1", REWARDS[1])]
    decided = decide(pending=late, committed=done, places=ONE_PLACE, wanted=TWO_EACH)
    assert decided.cancel_pending == ("7_1",)
    apart = {"rollout": ("big",), "reward": ("small",)}
    assert decide(pending=late, committed=done, places=apart, wanted=TWO_EACH).cancel_pending == ()


def test_an_element_is_not_withdrawn_while_it_may_have_something_to_do():
    early = Pending("7_1", NEXT_ROLLOUTS[1])
    decided = decide(
        pending=[early], committed=UNTIL_ROLLOUTS, ready=REWARDS, places=ONE_PLACE, wanted=TWO_EACH
    )
    assert decided.cancel_pending == ()
    spare, others = Pending("7_1", ROLLOUTS[1]), [ROLLOUTS[2], *REWARDS[:2]]
    decided = decide(
        pending=[spare], committed=[PREPARE, *ROLLOUTS[:2]], ready=others, places=ONE_PLACE, wanted=TWO_EACH
    )
    assert decided.cancel_pending == ()


def test_an_element_of_an_iteration_that_is_over_has_nothing_to_do():
    old = Pending("7_1", Task(0, Stage.ROLLOUT, 1))
    done = [*UNTIL_ROLLOUTS, *REWARDS]
    decided = decide(pending=[old], committed=done, ready=[UPDATE], places=ONE_PLACE, wanted=TWO_EACH)
    assert decided.cancel_pending == ("7_1",)


# --- who makes place ---

GPUS = Node("node", frozenset(["gpu"]), cpus=32, gpus=2, memory=64_000)
REWARDED = [PREPARE, *ROLLOUTS, *REWARDS]


def at(worker: Worker, *nodes: str) -> Worker:
    return replace(worker, nodes=nodes or ("node",))


def hand_over(workers, committed, claims=(), nodes=(GPUS,), wanted=TWO_EACH, places=ONE_PLACE, **more):
    """A pass over a run whose stages ask for a GPU each, of the two that there are."""
    ready = [t for t in PLAN.all_tasks() if t not in committed and {*PLAN.inputs(t)} <= {*committed}]
    more = {
        "committed": committed,
        "ready": ready,
        "wanted": wanted,
        "places": places,
        "nodes": nodes,
        **more,
    }
    return decide(workers, claims=claims, **more)


def test_rollouts_that_are_done_make_place_for_as_many_rewards_as_there_are_places():
    idle = [at(waiting(f"7_{i}r0", ROLLOUTS[i])) for i in range(2)]
    decided = hand_over(idle, [PREPARE, *ROLLOUTS])
    assert decided.requests == (WorkerRequest((REWARDS[2], REWARDS[3])),)
    assert leaving(decided) == {"7_0r0": "reward", "7_1r0": "reward"}


def test_nobody_leaves_where_there_is_room():
    idle, roomy = [at(waiting("7_0r0", ROLLOUTS[0]))], replace(GPUS, gpus=3)
    assert len(hand_over(idle, [PREPARE, *ROLLOUTS]).end_idle) == 1, "one of two places is free"
    decided = hand_over(idle, [PREPARE, *ROLLOUTS], nodes=[roomy])
    assert (len(decided.requests[0].tasks), decided.end_idle) == (2, ())


def test_nobody_leaves_for_a_job_of_nodes_where_it_is_not():
    idle = [at(waiting(f"7_{i}r0", ROLLOUTS[i])) for i in range(2)]
    other = replace(GPUS, name="other", partitions=frozenset(["cpu"]), gpus=0)
    places = {**ONE_PLACE, "reward": ("cpu",)}
    assert hand_over(idle, [PREPARE, *ROLLOUTS], places=places, nodes=[GPUS, other]).end_idle == ()


def test_who_will_have_nothing_to_do_is_chosen_before_it_has_ended():
    idle, at_work = at(waiting("7_0r0", ROLLOUTS[0])), at(busy("7_1r0", ROLLOUTS[1]))
    claims, done = [claim(ROLLOUTS[1], "7_1r0")], [PREPARE, ROLLOUTS[0], *ROLLOUTS[2:]]
    assert leaving(hand_over([idle, at_work], done, claims)) == {"7_0r0": "reward", "7_1r0": "reward"}
    assert leaving(hand_over([idle, at_work], done[:-1], claims)) == {}, "both have a shard to do yet"


def test_an_element_that_was_put_back_into_the_queue_gets_a_place_for_what_is_left():
    """It was preempted after it had done the task that it was submitted for."""
    idle = [at(waiting(f"8_{i}r0", REWARDS[i])) for i in range(2)]
    done = [PREPARE, *ROLLOUTS[1:], *REWARDS[1:]]
    back = [Pending("7_3", ROLLOUTS[3], lacks_room=True)]
    assert leaving(hand_over(idle, done, pending=back)) == {"8_0r0": "rollout"}
    nothing = [PREPARE, *ROLLOUTS]
    assert leaving(hand_over([idle[0], at(busy("8_1r0", REWARDS[1]))], nothing, pending=back)) == {}


def test_who_leaves_already_makes_room_for_one_and_no_second_leaves_for_that():
    leaves = at(replace(waiting("7_0r0", ROLLOUTS[0]), doing=Doing.LEAVING))
    stays = at(waiting("7_1r0", ROLLOUTS[1]))
    pending = [Pending("8_3", REWARDS[3], lacks_room=True)]
    done = [PREPARE, *ROLLOUTS, *REWARDS[:3]]
    assert hand_over([leaves, stays], done, pending=pending).end_idle == ()
    assert leaving(hand_over([at(waiting("7_0r0", ROLLOUTS[0])), stays], done, pending=pending)) == {
        "7_0r0": "reward"
    }


def test_of_two_who_wait_the_one_leaves_whose_next_task_is_further_away():
    workers = [at(waiting("7_0r0", ROLLOUTS[0])), at(waiting("8_0r0", REWARDS[0]))]
    soon, late = Estimate(next_input=110.0), Estimate(next_input=190.0)
    decided = hand_over(workers, REWARDED, estimates={"rollout": soon, "reward": late}, early=())
    assert leaving(decided) == {"8_0r0": "update"}
    decided = hand_over(workers, REWARDED, estimates={"rollout": late, "reward": soon}, early=())
    assert leaving(decided) == {"7_0r0": "update"}


def test_nobody_leaves_for_what_is_wanted_later_than_its_own_next_task():
    """Two kinds that give way to each other would only ever start up."""
    expected = {
        "rollout": Estimate(150.0, 1.0, 20.0, 5.0),
        "reward": Estimate(130.0, 1.0, 20.0, 5.0),
        "update": Estimate(140.0, 1.0, 20.0, 5.0),
    }
    one_each = dict.fromkeys(TWO_EACH, 1)
    at_work, idle = at(busy("9_0r0", UPDATE)), at(waiting("8_0r0", REWARDS[0]))
    decided = hand_over(
        [at_work, idle], REWARDED, [claim(UPDATE, "9_0r0")], estimates=expected, wanted=one_each
    )
    assert (decided.requests, decided.end_idle) == ((), ())
    expected["reward"] = replace(expected["reward"], next_input=170.0)
    decided = hand_over(
        [at_work, idle], REWARDED, [claim(UPDATE, "9_0r0")], estimates=expected, wanted=one_each
    )
    assert leaving(decided) == {"8_0r0": "rollout"}
    assert [(order.tasks, order.begin) for order in decided.requests] == [((NEXT_ROLLOUTS[3],), 129.0)]
    assert [one.at for one in decided.end_idle] == [129.0], "and not before that job may start"
    sent = [Pending("11_3", NEXT_ROLLOUTS[3], begin=129.0)]
    later = hand_over(
        *([at_work, idle], REWARDED, [claim(UPDATE, "9_0r0")]),
        estimates=expected,
        wanted=one_each,
        pending=sent,
        now=110.0,
    )
    assert [(one.worker, one.job, one.at) for one in later.end_idle] == [("8_0r0", "11_3", 129.0)], (
        "so it stays"
    )


def test_an_early_start_waits_for_nobody_s_place():
    at_work = [at(busy(f"7_{i}r0", ROLLOUTS[i])) for i in range(2)]
    claims = [claim(ROLLOUTS[i], f"7_{i}r0") for i in range(2)]
    expected = {"update": Estimate(105.0, 1.0, 20.0, 5.0), "rollout": Estimate(None, 1.0, 20.0, 50.0)}
    assert hand_over(at_work, [PREPARE], claims, estimates=expected).requests == ()


def test_what_lacks_room_that_sizes_of_nodes_do_not_explain_gets_a_place_all_the_same():
    """Other people's jobs are there."""
    idle = [at(waiting("7_0r0", ROLLOUTS[0]))]
    pending = [Pending("8_3", REWARDS[3], lacks_room=False)]
    done = [PREPARE, *ROLLOUTS, *REWARDS[:3]]
    assert hand_over(idle, done, pending=pending).end_idle == ()
    pending = [replace(pending[0], lacks_room=True)]
    assert leaving(hand_over(idle, done, pending=pending)) == {"7_0r0": "reward"}


def test_a_job_of_another_run_gets_the_place_of_who_waits_and_none_of_who_works():
    job = Foreign("other.run", Need(frozenset(["gpu"]), gpus=1))
    done, claims = [*REWARDED], [claim(UPDATE, "9_0r0")]
    waits, works = at(waiting("7_0r0", ROLLOUTS[0])), at(busy("9_0r0", UPDATE))
    decided = hand_over([waits, works], done, claims, foreign=[job], estimates={"rollout": Estimate(140.0)})
    assert [(one.worker, one.job) for one in decided.end_idle] == [("7_0r0", "other.run")]
    assert (
        hand_over([works], done, claims, foreign=[job], estimates={"update": Estimate(140.0)}).end_idle == ()
    )
    large = replace(job, need=replace(job.need, gpus=4))
    assert hand_over([waits, works], done, claims, foreign=[large]).end_idle == (), "it would not start"


def test_an_update_of_two_gpus_gets_those_of_two_workers_on_one_node():
    nodes = [GPUS, replace(GPUS, name="other")]
    workers = [at(waiting(f"7_{i}r0", ROLLOUTS[i]), "node" if i else "other") for i in range(3)]
    needs = {kind: Need(frozenset(["gpu"]), gpus=2 if kind == "update" else 1) for kind in TWO_EACH}
    decided = hand_over(workers, REWARDED, nodes=nodes, needs=needs, wanted={**TWO_EACH, "rollout": 4})
    assert leaving(decided) == {"7_0r0": "update"}, "beside it the other GPU of its node is free"
    both = [at(waiting(f"7_{i}r0", ROLLOUTS[i]), ("node", "other")[i % 2]) for i in range(4)]
    decided = hand_over(both, REWARDED, nodes=nodes, needs=needs, wanted={**TWO_EACH, "rollout": 4})
    assert leaving(decided) == {"7_0r0": "update", "7_2r0": "update"}


def test_nothing_is_queued_for_what_live_workers_take_sooner_than_a_new_one_starts():
    one, nodes = [at(waiting("7_0r0", ROLLOUTS[0]))], [replace(GPUS, gpus=64)]
    quick = {"rollout": Estimate(None, 2.0, 10.0, task=1.0)}
    assert hand_over(one, [PREPARE], estimates=quick, nodes=nodes, early=()).requests == ()
    slow = {"rollout": Estimate(None, 2.0, 10.0, task=60.0)}
    more = hand_over(one, [PREPARE], estimates=slow, nodes=nodes, wanted={"rollout": 4}, early=())
    assert [order.tasks for order in more.requests] == [tuple(ROLLOUTS[1:])]


def test_who_has_prepared_makes_place_whatever_is_expected():
    done = at(waiting("1_0r0", PREPARE))
    pending = [Pending("2_0", ROLLOUTS[0], lacks_room=True)]
    given = {"wanted": {"prepare": 1, "rollout": 1}, "places": {"prepare": ("gpu",), "rollout": ("gpu",)}}
    one_gpu, soon = [replace(GPUS, gpus=1)], {"prepare": Estimate(100.0)}
    decided = hand_over([done], [PREPARE], pending=pending, nodes=one_gpu, estimates=soon, early=(), **given)
    assert leaving(decided) == {"1_0r0": "rollout"}


def test_no_place_is_kept_for_what_is_measured_of_policies():
    """It comes where nobody needs the place, or has waited for long."""
    task = {kind: Estimate(None, 1.0, 10.0, task=2.0) for kind in (*TWO_EACH, "evaluate")}
    places = {**ONE_PLACE, "evaluate": ("gpu",)}
    wanted = {"rollout": 4, "evaluate": 1}
    given = {"places": places, "wanted": wanted, "estimates": task, "early": ()}
    assert [len(order.tasks) for order in hand_over([], [PREPARE], **given).requests] == [2]


def test_who_begins_later_is_in_nobody_s_way_before():
    """Withdrawn it would not be sent again."""
    later = Pending("11_0", NEXT_ROLLOUTS[0], begin=1000.0)
    lacking = Pending("8_3", REWARDS[3], lacks_room=True)
    done = [PREPARE, *ROLLOUTS, *REWARDS[:3]]
    assert hand_over([], done, pending=[later, lacking]).cancel_pending == ()
    assert hand_over([], done, pending=[later, lacking], now=1000.0).cancel_pending == ("11_0",)


def test_there_are_no_more_elements_than_places():
    assert hand_over([], [PREPARE]).requests == (WorkerRequest((ROLLOUTS[2], ROLLOUTS[3])),)
    assert len(hand_over([], [PREPARE], nodes=[]).requests[0].tasks) == 2, "by the settings"
    surplus = [Pending(f"7_{i}", ROLLOUTS[i]) for i in range(4)]
    decided = hand_over([], [PREPARE], pending=surplus, wanted={"rollout": 4})
    assert decided.cancel_pending == ("7_3", "7_2")
