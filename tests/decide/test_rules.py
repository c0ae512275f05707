"""How long a worker stays, and what it expects."""

import time
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.scheduler import ResourcesConfig, SlurmConfig
from pipeline.decide import estimates, passages, staying
from pipeline.decide.choosing import Chosen, Step
from pipeline.decide.passages import Passage, Took
from pipeline.decide.staying import Wait
from pipeline.metrics.spans import Span, SpanEnd, iteration_spans, to_line
from pipeline.run.plan import Plan, policy_maker
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.workers.beats import Beat, Doing, LiveWorkers, Reason, write_beat
from pipeline.workers.outside import WorkerHost
from pipeline.workers.overdue import is_overdue, seconds_of_iterations
from stages.workers.pulse import Pulse
from stages.workers.waiting import Waiting
from tests.support import reportrun

seconds = st.floats(0, 1e4)


@given(seconds, seconds, st.lists(seconds | st.none(), max_size=4))
def test_others_are_waited_for_that_come_back_too_but_not_for_ever(most, own, others):
    bound = staying.bound("auto", most, own, 0.0)
    more = staying.allowance("auto", most, bound, others)
    assert 0 <= more <= 3 * bound
    assert bound + more <= most + 1e-6
    assert staying.allowance(60, most, bound, others) == 0
    assert (
        staying.allowance("auto", 1e9, own, [None]) == own == staying.allowance("auto", 1e9, own, [own + 1])
    )


@given(seconds, seconds | st.none(), seconds | st.none())
def test_an_automatic_bound_is_what_coming_back_costs(most, startup, queue):
    found = staying.bound("auto", most, startup, queue)
    assert found == min(most, (startup or 0) + (queue or 0) + 3), "and a pass, which submits it"
    assert staying.bound(7, most, startup, queue) == 7


@given(seconds, seconds, seconds | st.none(), seconds, seconds)
def test_who_waits_leaves_at_the_bound_or_at_once_when_the_input_comes_later(
    began, bound, expected, now, allowance
):
    wait = Wait(began, bound, expected, allowance)
    reason = staying.reason_to_leave(wait, now)
    if now >= began + bound + allowance:
        assert reason is Reason.LONG
    else:
        assert (reason is Reason.FAR) == (expected is not None and expected > now + bound)


@given(seconds, seconds | st.none(), seconds | st.none(), st.floats(0, 200))
def test_no_task_is_begun_that_may_not_end_in_time(now, ends, limit, warning):
    if staying.has_time(now, ends, limit, warning) and ends is not None and limit is not None:
        assert now + limit + warning <= ends + 1e-6


def test_a_task_may_take_ten_times_the_median_unless_told_otherwise():
    assert staying.task_limit(None, 12.0) == 120
    assert staying.task_limit(None, 0.1) == 60
    assert staying.task_limit(None, 12.0, startup=40.0) == 520
    assert staying.task_limit(30.0, 12.0) == 30
    assert staying.task_limit(None, None) is None


@given(st.lists(st.integers(1, 100 * 2**30), max_size=6))
def test_a_worker_leaves_only_when_it_has_grown_by_half_and_by_half_a_gibibyte(sizes):
    expected = len(sizes) > 3 and sizes[-1] > 1.5 * sizes[2] and sizes[-1] > sizes[2] + 2**29
    assert staying.has_grown(sizes) is expected


def test_memory_that_settles_is_no_growth():
    gib = 2**30
    assert not staying.has_grown([gib, 4 * gib, 5 * gib, 5 * gib, 6 * gib])
    assert staying.has_grown([gib, gib, gib, 2 * gib])
    assert not staying.has_grown([gib // 8, gib // 8, gib // 8, gib // 2])


@given(st.floats(0, 1e5), st.floats(0, 1e5), st.booleans())
def test_looks_become_rarer_up_to_a_bound(a, b, is_network):
    first, later = staying.pause(min(a, b), is_network), staying.pause(max(a, b), is_network)
    assert 0.01 <= first <= later <= (5.0 if is_network else 1.0)


@given(st.floats(0, 1e5), st.floats(0, 1e5))
def test_nobody_looks_often_on_a_network_filesystem_for_what_is_still_far(waited, ahead):
    soon = staying.pause(waited, is_network=True)
    far = staying.pause(waited, is_network=True, ahead=ahead)
    assert soon <= far <= max(soon, min(5.0, waited, ahead / 2))
    assert staying.pause(waited, is_network=False, ahead=ahead) == staying.pause(waited, is_network=False)


@given(seconds, st.floats(-1e5, 1e5), st.none() | st.floats(0, 1e4))
def test_a_pass_is_overdue_after_a_minute_and_three_iterations(newest, age, iteration):
    found = is_overdue(newest, newest + age, iteration)
    assert found == (abs((newest + age) - newest) > max(60.0, 3 * (iteration or 0.0)))


def test_an_iteration_takes_what_the_last_ones_took():
    rows = [{"iteration": k, "seconds/iteration": s} for k, s in enumerate([900.0] + 8 * [5] + [7.0])]
    assert seconds_of_iterations(rows) == 5
    assert seconds_of_iterations([{"iteration": 1}, {"seconds/iteration": "?"}]) is None


# --- estimates ---

PLAN = Plan(9, 2, 0)


def line(iteration: int, *stages: tuple[str, float, float]) -> dict:
    spans = [
        Span(kind, 0, "1-a", SpanEnd.COMMITTED, ready=ready, started=ready, ended=ended)
        for kind, ready, ended in stages
    ]
    return to_line(iteration_spans(iteration, spans))


LINES = [
    line(
        k,
        ("rollout", 100.0 * k, 100.0 * k + 40),
        ("reward", 100.0 * k + 40, 100.0 * k + 50),
        ("update", 100.0 * k + 50, 100.0 * k + 80),
    )
    for k in (1, 2, 3)
]


def passage(iteration: int, job_kind: str, *seconds: float) -> Passage:
    return Passage(iteration, job_kind, Took(*seconds), Took(*seconds))


def test_the_next_input_is_expected_when_the_stages_between_have_taken_their_time():
    seen = passages.passages(LINES)
    times = {PREPARE: 1.0, policy_maker(3): 1000.0}
    at = times.get
    rollout, update = Task(4, Stage.ROLLOUT), policy_maker(4)
    assert passages.expected_ready(PLAN, rollout, at, seen, 1001) == 1000
    assert passages.expected_ready(PLAN, update, at, seen, 1001) == 1050
    assert passages.expected_ready(PLAN, rollout._replace(iteration=5), at, seen, 1001) == 1080
    assert passages.expected_ready(PLAN, update, at, seen, 1300) == 1310  # rollouts are overdue: any moment


def test_rewards_begin_with_the_first_rollout_and_the_update_ends_with_the_last_reward():
    """Two rollouts one after the other, each of 40 s; a reward takes 10 s more."""
    at_once = [
        *(
            Span("rollout", i, "1-a", SpanEnd.COMMITTED, 100.0, 100.0, 100.0, t)
            for i, t in enumerate([140.0, 180.0])
        ),
        *(Span("reward", i, "1-a", SpanEnd.COMMITTED, t, t, t, t + 10) for i, t in enumerate([140.0, 180.0])),
        Span("update", 0, "1-a", SpanEnd.COMMITTED, 190.0, 190.0, 190.0, 220.0),
    ]
    seen = passages.passages([to_line(iteration_spans(1, at_once))])
    at = {PREPARE: 1.0, policy_maker(1): 1000.0}.get
    assert passages.expected_ready(PLAN, Task(2, Stage.REWARD), at, seen, 1001) == 1040
    assert passages.expected_ready(PLAN, Task(2, Stage.REWARD), at, seen, 1050) == 1050, "any moment"
    assert passages.expected_ready(PLAN, policy_maker(2), at, seen, 1001) == 1090
    assert passages.expected_ready(PLAN, Task(3, Stage.ROLLOUT), at, seen, 1001) == 1120
    assert passages.expected_ready(PLAN, Task(3, Stage.REWARD), at, seen, 1001) == 1160


def test_who_leaves_for_a_far_input_does_not_count_how_long_others_waited_for_jobs():
    kinds = ("rollout", "reward", "update")
    seen = [passage(k, kind, 100.0, 3.0 + k, 1.0 + k) for k in (1, 2) for kind in kinds]
    task, times = Task(5, Stage.ROLLOUT), {PREPARE: 1.0, policy_maker(3): 1000.0}
    assert passages.expected_ready(PLAN, task, times.get, seen, 1000) == 1300
    assert passages.expected_ready(PLAN, task, times.get, seen, 1000, staying=()) == 1012
    # nor how long they loaded, where they stay
    assert passages.expected_ready(PLAN, task, times.get, seen, 1000, staying=kinds) == 1006
    assert passages.expected_ready(PLAN, task, times.get, seen, 1000, staying=["update"]) == 1010


def test_of_a_passage_where_processes_stay_loading_is_no_part():
    spans = [
        Span("reward", i, "1-a", SpanEnd.COMMITTED, ready=10.0, started=12.0, computing=begin, ended=end)
        for i, (begin, end) in enumerate([(22.0, 25.0), (24.0, 26.0), (40.0, 43.0)])
    ]
    failed = Span("reward", 0, "2-a", SpanEnd.FAILED, ready=10.0, started=12.0, computing=13.0, ended=20.0)
    [found] = passages.passages([to_line(iteration_spans(1, [*spans, failed]))])
    assert found.last == Took(33.0, 31.0, 7.0)
    assert found.first == Took(15.0, 13.0, 3.0)


def test_what_a_stage_does_while_the_one_before_goes_on_takes_no_time_of_its_own():
    """Three rollouts end at 10, 20 and 30, each is scored in 4 s; the update follows 4 s after the last."""
    spans = [
        Span("reward", i, "1-a", SpanEnd.COMMITTED, ready=at, started=at, computing=at + 1, ended=at + 4)
        for i, at in enumerate([10.0, 20.0, 30.0])
    ]
    [found] = passages.passages([to_line(iteration_spans(1, spans))])
    assert found.last == found.first == Took(4.0, 4.0, 3.0)
    slow = replace(spans[0], computing=33.0, ended=50.0)
    [found] = passages.passages([to_line(iteration_spans(1, [slow, *spans[1:]]))])
    assert found.last == Took(20.0, 20.0, 19.0), "31 to 34 and 33 to 50"
    assert found.first == Took(14.0, 14.0, 3.0), "from the first input on"


def test_those_who_have_just_started_up_take_away_nothing_that_is_known():
    done = Beat("1_0r0", "reward", "h", 1, 0.0, startup_seconds=9.0, tasks=2, busy_seconds=8.0)
    new = [Beat(f"2_{i}r0", "reward", "h", 1, 50.0 + i) for i in range(40)]
    assert estimates.task_seconds([done, *new], "reward") == 4.0
    assert estimates.startup([done, *new], "reward").median == 9.0


def test_a_start_beside_others_is_as_long_as_it_was_beside_others():
    beats = [Beat(f"1_{i}r0", "rollout", "h", 1, 0.0, startup_seconds=80.0) for i in range(3)]
    beats.append(Beat("2_0r0", "rollout", "h", 1, 500.0, startup_seconds=20.0))
    assert estimates.startup(beats, "rollout").median == 20.0, "of one alone"
    assert estimates.startup_together(beats, "rollout") == 80.0
    assert estimates.startup_together([], "rollout") is None


def test_where_nothing_is_known_nothing_is_expected():
    assert passages.expected_ready(PLAN, policy_maker(1), {PREPARE: 1.0}.get, [], 2.0) is None
    broken = [{"iteration": 1, "stages": {"rollout": {"ready": None, "ended": 3}}}, {"stages": 4}, {}]
    assert passages.passages(broken) == []
    assert estimates.startup([], "rollout") is None
    assert estimates.task_seconds([Beat("a", "rollout", "h", 1, 0.0)], "rollout") is None


def test_coming_back_is_unknown_until_one_has_started_up():
    starting = Beat("1_0r0", "reward", "h", 1, 0.0, queued_seconds=2.0)
    assert estimates.coming_back([starting], "reward") is None
    assert estimates.coming_back([starting, replace(starting, startup_seconds=9.0)], "reward") == 11.0


def test_while_few_of_a_kind_have_waited_in_the_queue_the_waits_of_all_kinds_count():
    """The first of a kind may have found a place by luck."""
    waits = {"prepare": [40.0], "rollout": [2.0, 6.0], "reward": [120.0]}
    beats = [
        Beat(f"{kind}_{i}r0", kind, "h", 1, float(i), queued_seconds=wait)
        for kind, of_kind in waits.items()
        for i, wait in enumerate(of_kind)
    ]
    assert estimates.queue_wait(beats, "rollout").mean == 42.0
    assert estimates.queue_wait(beats, "update").least == 2.0, "none of it has come yet"
    third = replace(beats[1], worker="rollout_3r0", queued_seconds=4.0)
    assert estimates.queue_wait([*beats, third], "rollout").mean == 4.0
    assert estimates.queue_wait([], "rollout") is None


def test_one_shard_that_is_missing_makes_its_stage_unfinished():
    seen = passages.passages(LINES)
    times = {PREPARE: 1.0, policy_maker(3): 1000.0} | {Task(4, Stage.ROLLOUT, s): 1040.0 for s in (0, 1)}
    times[Task(4, Stage.REWARD, 0)] = 1042.0
    assert passages.expected_ready(PLAN, policy_maker(4), times.get, seen, 1043) == 1050


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=40))
def test_medians_are_of_the_latest(values):
    beats = [
        Beat(
            f"w{i}",
            "rollout",
            "h",
            1,
            200.0 * i,
            startup_seconds=value,
            queued_seconds=value,
            busy_seconds=value,
            tasks=1,
        )
        for i, value in enumerate(values)
    ]
    last = values[-16:]
    for found in (estimates.startup(beats, "rollout"), estimates.queue_wait(beats, "rollout")):
        assert min(last) <= found.median <= max(last)
        assert found.median <= found.late or len(last) < 3
    assert estimates.task_seconds(beats, "rollout") == estimates.startup(beats, "rollout").median
    assert estimates.startup(beats, "reward") is None


def test_a_start_takes_what_it_took_those_who_started_alone_and_found_a_task():
    def started(name: str, at: float, took: float, **more) -> Beat:
        return Beat(name, "rollout", "h", 1, at, startup_seconds=took, **{"tasks": 1, **more})

    together = [started("1_0r0", 0.0, 16.0), started("1_1r0", 3.0, 14.0)]
    assert estimates.startup(together, "rollout").median == 15.0, "nobody started alone yet"
    alone, elsewhere = started("2_0r0", 100.0, 5.0), replace(started("3_0r0", 101.0, 6.0), host="g")
    assert estimates.startup([*together, alone], "rollout").median == 5.0
    assert estimates.startup([*together, alone, elsewhere], "rollout").median == 5.5
    beside = replace(started("4_0r0", 102.0, 9.0), job_kind="reward")
    assert estimates.startup([*together, alone, beside], "rollout").median == 14.0, "each made the other slow"
    in_vain = started("5_0r0", 200.0, 40.0, tasks=0, doing=Doing.LEAVING)
    assert estimates.startup([*together, alone, in_vain], "rollout").median == 5.0


@given(st.lists(st.floats(0, 50), min_size=1, max_size=20), st.floats(0, 50))
def test_a_passage_that_takes_longer_is_expected_later(times, more):
    seen = [passage(k, "rollout", value, value / 2, value / 4) for k, value in enumerate(times)]
    later = [passage(k, "rollout", v + more, v / 2 + more, v / 4) for k, v in enumerate(times)]
    task, at = Task(1, Stage.REWARD), {PREPARE: 5.0}.get
    assert passages.expected_ready(PLAN, task, at, seen, 6.0) <= passages.expected_ready(
        PLAN, task, at, later, 6.0
    )


def test_who_alone_has_the_trainer_s_state_waits_for_as_long_as_saving_it_takes_too():
    own = Beat("9_0r0", "update", "node", 1, 0.0, startup_seconds=20.0, queued_seconds=2.0)
    terms = staying.Terms("auto", 3600.0, starts_early=True)
    waits = [staying.begin_wait(terms, 100.0, False, [], own, [], seconds) for seconds in (0.0, 52.0)]
    assert [wait.bound for wait in waits] == [25.0, 77.0]


def test_where_others_may_take_the_place_few_short_waits_say_little():
    """One more is imagined, as long as anybody stays: it weighs less the more often nobody had to wait."""
    terms = staying.Terms("auto", 3600.0, starts_early=True, is_contended=True)

    def bound(starts: int, terms: staying.Terms = terms) -> float:
        beats = [
            Beat(f"{i}_0r0", "reward", "node", 1, float(i), startup_seconds=5.0, queued_seconds=1.0)
            for i in range(starts)
        ]
        return staying.begin_wait(terms, 100.0, False, beats, beats[-1], []).bound

    assert bound(1) == (1 + 3600) / 2 + 5 + 3
    assert bound(7) == (7 + 3600) / 8 + 5 + 3
    assert bound(7, replace(terms, is_contended=False)) == 1 + 5 + 3
    assert bound(1, replace(terms, linger=20)) == 20.0, "as it is set"


def test_who_needed_long_to_start_up_waits_as_long_whatever_files_of_others_say_so_far(tmp_path):
    """Right after their first tasks: what those have loaded is not in anybody's file yet."""
    scheduler = SlurmConfig(rollout=ResourcesConfig(linger="auto"))
    run = reportrun.make_run(tmp_path / "run", scheduler=scheduler)
    for worker, startup in (("9_1r0", 5.0), ("9_2r0", 4.0)):
        write_beat(run.paths, Beat(worker, "rollout", "node", 1, 0.0, since=0.0, startup_seconds=startup))
    own = Beat("9_0r0", "rollout", "node", 1, 0.0, since=0.0, tasks=1, startup_seconds=20.0)
    crew = LiveWorkers(run.paths)
    crew.live(time.time())
    outside, pulse = WorkerHost(own.worker, str), Pulse(run.paths, own)
    waiting = Waiting(run, "rollout", scheduler.rollout, 600.0, outside, pulse, crew)
    choice = Chosen(Step.WAIT, Task(2, Stage.ROLLOUT), awaited=(frozenset([policy_maker(1)]),))
    assert waiting.go_on(choice, is_first=False) is None
    assert waiting.wait.bound == 23.0, "and a pass"
