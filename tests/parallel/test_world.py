"""A world of one works like any other, and every way of talking says what it should on real processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from drumline.core.environment import RankInfo, to_env
from drumline.core.errors import UserError
from drumline.launch.network import free_port
from drumline.parallel.process_group import choose_backend, init_world, resolve_device_type
from drumline.parallel.world import Pending, World, make_grid, single_process
from tests.training import ranks

CPU = torch.device("cpu")
SIZES = pytest.mark.parametrize("size", [2, 3])


def column(size: int, name: str) -> list[object]:
    return [result[name] for result in ranks.results(size)]


def test_every_method_works_on_a_world_of_one() -> None:
    world = single_process(CPU)
    values = torch.tensor([1.0, 2.0])
    assert world.is_rank_zero
    assert world.all_reduce(values) is values
    assert world.broadcast(values) is values
    assert values.tolist() == [1, 2]
    assert world.broadcast_object("x") == "x"
    assert world.all_gather_floats([1, 2.5]) == [[1, 2.5]]
    assert world.all_gather_integers(torch.tensor([7, 2**60])).tolist() == [[7, 2**60]]
    assert world.all_reduce_max_async(values) is None
    world.barrier()
    assert world.claim_failure()
    world.close()


@pytest.mark.slow
@SIZES
def test_sum_and_broadcast_reach_every_rank(size: int) -> None:
    total = [sum(range(1, size + 1)), 10.0 * sum(range(size))]
    assert column(size, "sum") == [total] * size
    assert column(size, "broadcast") == [[1.0, 0.0]] * size
    assert column(size, "backend") == ["gloo"] * size


@pytest.mark.slow
@SIZES
def test_share_gives_rank_0s_value_to_all(size: int) -> None:
    assert column(size, "share") == [{"path": "from 0"}] * size


@pytest.mark.slow
@SIZES
def test_gather_is_in_rank_order_and_exact_for_64_bit_integers(size: int) -> None:
    assert column(size, "gather") == [[[rank, 0.1] for rank in range(size)]] * size
    integers = [[2**53 + rank, -rank] for rank in range(size)]
    assert column(size, "integers") == [integers] * size


@pytest.mark.slow
@SIZES
def test_the_maximum_arrives_later_on_every_rank(size: int) -> None:
    assert column(size, "maximum") == [[size - 1, 0]] * size


@pytest.mark.slow
@SIZES
def test_only_the_first_rank_that_fails_may_say_so(size: int) -> None:
    assert column(size, "failed_first") == [False] * (size - 1) + [True]


@pytest.mark.slow
@SIZES
def test_a_rank_that_fails_because_rank_0_is_gone_was_not_first(size: int) -> None:
    """Rank 0 holds the meeting place when the variables are set by hand."""
    found = [result["failed_first_after_rank_0"] for result in ranks.results(size)[1:]]
    assert found == [False] * (size - 1)


def test_cpu_processes_talk_over_gloo() -> None:
    assert choose_backend("auto", CPU, shared=False) == "gloo"
    assert choose_backend("gloo", CPU, shared=False) == "gloo"


def test_a_backend_that_torch_was_built_without_is_rejected() -> None:
    if torch.distributed.is_mpi_available():
        pytest.skip("this torch has MPI")
    with pytest.raises(UserError, match=r"parallel.backend = mpi: this build of torch does not include it"):
        choose_backend("mpi", CPU, shared=False)


def test_more_processes_than_gpus_share_them_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    gpu = torch.device("cuda", 0)
    assert choose_backend("auto", gpu, shared=False) == "nccl"
    assert choose_backend("auto", gpu, shared=True) == "gloo"
    with pytest.raises(UserError, match="several processes share a GPU"):
        choose_backend("nccl", gpu, shared=True)


def test_one_process_needs_no_rendezvous() -> None:
    info = RankInfo(0, 1, 0, 1, 0, "127.0.0.1", 1, "env")
    assert init_world(None, "cpu", "auto", 1) == init_world(info, "cpu", "auto", 1) == single_process(CPU)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_world_that_does_not_meet_says_where_and_for_how_long(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    info = RankInfo(rank, 2, rank, 2, 0, "127.0.0.1", free_port("127.0.0.1"), "env")
    for name in to_env(info):
        monkeypatch.setenv(name, "")
    where = f"127.0.0.1:{info.master_port}"
    with pytest.raises(
        UserError, match=f"rank {rank} of 2 could not reach the other ranks at {where} within 1 s"
    ):
        init_world(info, "cpu", "gloo", 1)


def test_cuda_without_a_gpu_is_rejected_and_auto_takes_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device_type("auto") == "cpu"
    assert resolve_device_type("cpu") == "cpu"
    with pytest.raises(UserError, match="torch sees no GPU"):
        resolve_device_type("cuda")


def test_every_link_of_a_part_has_carried_a_message_before_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL holds both hosts at the first: in the same order everywhere, none waits for another."""
    said: dict[int, list[str]] = {}
    monkeypatch.setattr(torch.distributed, "new_group", lambda *_, **__: None)

    def isend(self: World, tensor: torch.Tensor, to: int) -> Pending:
        said[self.rank].append(f"to {to}")
        return Pending(tensor)

    def irecv(self: World, into: torch.Tensor, source: int) -> Pending:
        said[self.rank].append(f"from {source}")
        return Pending(into)

    monkeypatch.setattr(World, "isend", isend)
    monkeypatch.setattr(World, "irecv", irecv)
    for rank in range(3):
        said[rank] = []
        world = replace(single_process(CPU), rank=rank, size=3, backend="nccl")
        world.split([[0, 1, 2]], [(0, 1), (1, 2), (2, 0)])
    assert said == {0: ["to 1", "from 2"], 1: ["from 0", "to 2"], 2: ["from 1", "to 0"]}


def test_rank_0_is_the_one_that_writes() -> None:
    assert not replace(single_process(CPU), rank=1, size=2).is_rank_zero
    assert isinstance(single_process(CPU), World)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_over_nccl_every_neighbour_has_a_link_of_its_own_in_each_direction(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL takes the messages of a group in turn, so one that waits would hold up the rest; gloo has tags."""
    asked: list[tuple[list[list[int]], list[tuple[int, int]]]] = []

    def split(self: World, parts: Sequence[Sequence[int]], links: Sequence[tuple[int, int]] = ()) -> World:
        asked.append(([list(each) for each in parts], list(links)))
        return self

    monkeypatch.setattr(World, "split", split)
    world = replace(single_process(torch.device("cpu")), size=6, rank=4, backend=backend)
    grid = make_grid(world, 3)
    assert (grid.place, grid.replica, grid.reads, grid.ends) == (1, 1, False, False)
    onward, back = [(0, 1), (1, 2), (2, 0)], [(1, 0), (2, 1), (0, 2)]
    replicas = [[0, 1, 2], [3, 4, 5]]
    assert asked == [
        ([[0, 3], [1, 4], [2, 5]], []),
        (replicas, onward if backend == "nccl" else []),
        (replicas, back if backend == "nccl" else []),
    ]
