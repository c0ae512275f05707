"""Places on nodes, and how job kinds divide them: what fits, whose end makes room, sharing against turns."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.decide.places import Candidate, Held, Need, count, make_room, place, room_of, with_end_of
from pipeline.decide.sharing import Work, fits_all, targets, targets_by_group
from slurm.nodes import Node

GPU = frozenset(["gpu"])


def node(name="a", gpus=2, cpus=8, memory=64_000, partitions=GPU) -> Node:
    return Node(name, frozenset(partitions), cpus, gpus, memory)


def need(gpus=1, cpus=1, memory=0, num_nodes=1, partitions=GPU) -> Need:
    return Need(frozenset(partitions), cpus, gpus, memory, num_nodes)


def test_a_job_fits_where_its_partition_has_a_node_with_enough_of_everything():
    room = room_of([node("a"), node("b", gpus=4, memory=1000), node("c", gpus=8, partitions=["cpu"])])
    assert place(room, need(gpus=3)) is not None
    assert place(room, need(gpus=3, memory=2000)) is None, "where there are so many GPUs memory is small"
    assert place(room, need(gpus=8)) is None, "those are in another partition"
    assert place(room, need(gpus=8, partitions=["gpu", "cpu"])) is not None
    assert place(room, need(gpus=2, num_nodes=2)) is not None
    assert place(room, need(gpus=3, num_nodes=2)) is None


def test_what_jobs_hold_is_taken_and_what_they_leave_is_given_back():
    room = room_of([node("a")], [Held("a", need(cpus=6)), Held("elsewhere", need())])
    assert (room["a"].gpus, room["a"].cpus) == (1, 2)
    assert count(room, need(), 10) == 1
    assert count(room, need(gpus=0, cpus=1), 10) == 2
    assert count(room, need(gpus=0, cpus=1), 1) == 1
    assert with_end_of(room, [Candidate("w", ("a", "gone"), need(cpus=6))]) == room_of([node("a")])


def test_as_few_workers_as_do_make_room():
    room = room_of([node("a", gpus=0), node("b", gpus=0)])
    small = [Candidate(f"a{i}", ("a",), need()) for i in range(3)]
    large = Candidate("b0", ("b",), need(gpus=4))
    assert make_room(room, need(), [*small, large]) == (small[0],), "the first of those who do"
    assert make_room(room, need(gpus=3), [*small, large]) == (large,)
    assert make_room(room, need(gpus=2), small) == tuple(small[:2])
    assert make_room(room, need(gpus=4), small) is None
    assert make_room(room, need(num_nodes=2), [*small, large]) == (small[0], large)
    assert make_room(room, need(partitions=["cpu"]), [*small, large]) is None


def test_a_small_worker_whose_end_is_not_needed_beside_a_large_one_stays():
    small, large = Candidate("s", ("a",), need()), Candidate("l", ("a",), need(gpus=3))
    assert make_room(room_of([node("a", gpus=0)]), need(gpus=3), [small, large]) == (large,)


@given(
    free=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    workers=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), max_size=5),
    gpus=st.integers(1, 5),
)
def test_room_is_made_wherever_it_can_be_and_nobody_leaves_in_vain(free, workers, gpus):
    room = room_of([node(str(i), gpus=n) for i, n in enumerate(free)])
    candidates = [
        Candidate(f"w{i}", (str(where % len(free)),), need(size)) for i, (where, size) in enumerate(workers)
    ]

    def does(chosen) -> bool:
        return place(with_end_of(room, chosen), need(gpus)) is not None

    if does(()):
        return
    chosen = make_room(room, need(gpus), candidates)
    subsets = [s for size in range(1, len(candidates) + 1) for s in combinations(candidates, size)]
    assert (chosen is not None) == any(map(does, subsets))
    if chosen:
        assert does(chosen)
        assert not any(does([one for one in chosen if one is not left]) for left in chosen)


# --- sharing and taking turns ---


def work(wanted=4, seconds=2.0, back=10.0, gpus=1, partitions=GPU) -> Work:
    return Work(need(gpus, partitions=partitions), wanted, wanted, seconds, back)


def test_where_all_have_room_everybody_has_as_many_as_wanted():
    assert targets({"rollout": work(), "reward": work()}, room_of([node(gpus=8)])) == {
        "rollout": 4,
        "reward": 4,
    }
    assert targets({"rollout": work()}, {}) == {"rollout": 4}, "nobody knows the nodes"


def test_short_tasks_share_few_places_and_long_ones_take_turns():
    room = room_of([node(gpus=4)])
    short = {"rollout": work(seconds=6.0), "reward": work(seconds=1.0)}
    assert targets(short, room) == {"rollout": 3, "reward": 1}
    long = {"rollout": work(seconds=600.0), "reward": work(seconds=600.0)}
    assert targets(long, room) == {"rollout": 4, "reward": 4}


def test_what_is_not_known_takes_turns():
    room = room_of([node(gpus=4)])
    assert targets({"rollout": work(seconds=None), "reward": work()}, room) == {"rollout": 4, "reward": 4}


def test_what_can_never_be_there_at_once_takes_turns():
    both = {"rollout": work(gpus=2), "update": work(wanted=1, gpus=2)}
    assert targets(both, room_of([node(gpus=2)])) == {"rollout": 1, "update": 1}


def test_a_job_that_fits_no_node_that_is_known_is_left_to_slurm():
    assert targets({"rollout": work(gpus=16)}, room_of([node()])) == {"rollout": 4}


def test_kinds_of_other_nodes_are_no_matter():
    room = room_of([node("a"), node("b", partitions=["big"])])
    works = {"rollout": work(), "evaluate": work(1), "update": work(1, gpus=2, partitions=["big"])}
    assert targets_by_group(works, room) == {"rollout": 1, "evaluate": 1, "update": 1}


@given(
    gpus=st.integers(1, 12),
    works=st.lists(
        st.tuples(st.integers(1, 8), st.floats(0.0, 500.0), st.floats(0.0, 60.0), st.integers(1, 3)),
        min_size=1,
        max_size=4,
    ),
)
def test_targets_are_never_more_than_places_nor_less_than_one_where_jobs_fit(gpus, works):
    room = room_of([node(gpus=gpus, cpus=100)])
    kinds = {f"kind{i}": work(w, s, b, g) for i, (w, s, b, g) in enumerate(works)}
    found = targets(kinds, room)
    alone = {k: count(room, w.need, w.wanted) or w.wanted for k, w in kinds.items()}  # else it is Slurm's
    for kind, number in found.items():
        assert 1 <= number <= alone[kind]
    if any(found[kind] < alone[kind] for kind in kinds):
        needs = {kind: one.need for kind, one in kinds.items()}
        assert fits_all(needs, found, room), "who has less than all shares, and then all are there at once"
