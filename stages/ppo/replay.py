"""Router replay (R3, arXiv 2510.11370): the policy is trained with the experts that its rollout went through.

A response whose tokens go through other experts than those that wrote it has other probabilities; where
engine and trainer round differently, some do. So the update takes the experts of the rollout. Their weights
are what the routers give them as they are, and have a gradient.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.context import UserError
from stages.models.routing import Routing
from stages.ppo.batching import MicroBatch, Row

_KEY = "algorithm.router_replay=true"
_WAY_OUT = "roll out once more (resume RUN --from rollout@ITERATION)"


@dataclass(frozen=True)
class Replay:
    """The routers of a policy that is trained with the experts of its rollouts; None where it chooses its
    own."""

    routing: Routing | None

    @contextlib.contextmanager
    def of(self, batch: MicroBatch, add: Callable[[str, Tensor], None] | None = None) -> Iterator[None]:
        """Send the tokens of a micro-batch through their experts, in all passes of the block. Layers that the
        backward pass computes again are a part of it.

        Args:
            add: takes numbers by name: of the choices that were replayed, one for each token and layer, and
                of those that are not the router's own. Not called for a dummy.
        """
        if self.routing is None:
            yield
            return
        assert batch.routes is not None, "they were checked"
        given = batch.routes.flatten(0, 1).long().unflatten(1, (-1, self.routing.top_k))
        is_given = given[:, 0, :1] >= 0
        differing: dict[int, Tensor] = {}

        def choose(layer: int, own: Tensor) -> Tensor:
            if len(own) != len(given):  # a few tokens, with which the output layer is tried
                return own
            chosen = torch.where(is_given, given[:, layer], own)
            is_other = (chosen.sort(dim=1).values != own.sort(dim=1).values).any(dim=1)
            differing[layer] = is_other.sum()
            return chosen

        with self.routing.choosing(choose):
            yield
        assert len(differing) == given.shape[1], "no pass was of this micro-batch"
        if add is not None and not batch.is_dummy:
            add("replayed", is_given.sum().double() * given.shape[1])
            add("replayed_differ", torch.stack(list(differing.values())).sum().double())

    def check(self, rows: Sequence[Row]) -> None:
        """Check that every response has experts of this model for all of its tokens but the last. Raises
        UserError."""
        if self.routing is None:
            return
        for row in rows:
            if len(row.response) and (problem := _problem_of(row, self.routing)):
                raise UserError(f"{_KEY}: {problem}")


def _problem_of(row: Row, routing: Routing) -> str | None:
    if row.routes is None:
        return "the rollout shards have no column routed_experts; leave it out"
    wanted, largest = (row.length - 1, routing.width), int(row.routes.max(initial=0))
    if row.routes.shape != wanted:
        found = f"{_shape(row.routes.shape)} experts, and this policy wants {_shape(wanted)}"
        return f"a response of {row.length} tokens has {found}; {_WAY_OUT}"
    if largest >= routing.num_experts:
        return f"a response has expert {largest}, and this policy has {routing.num_experts}; {_WAY_OUT}"
    return None


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
