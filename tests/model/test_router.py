from __future__ import annotations

from dataclasses import replace

import torch

from zaya_tools.model.router import route

from .support import BASE, random_model

ROUTER = tuple(random_model(BASE).blocks)[1].router


def tokens() -> torch.Tensor:
    return torch.randn(50, BASE.hidden_size, generator=torch.Generator().manual_seed(0))


def test_biases_choose_and_never_weigh() -> None:
    forced = [replace(ROUTER, balancing=10 * torch.eye(BASE.experts + 1)[i]) for i in range(BASE.experts + 1)]
    routings = [route(tokens(), None, router)[0] for router in forced]
    for i, routing in enumerate(routings):
        assert (routing.choice == i).all()
    # Over all classes, skip included, what a token's choice would weigh adds up to one.
    torch.testing.assert_close(sum(routing.weight for routing in routings), torch.ones(50))


def test_states_are_carried_before_the_norm() -> None:
    _, alone = route(tokens(), None, ROUTER)
    carried = torch.ones(50, BASE.router_width)
    _, states = route(tokens(), carried, ROUTER)
    assert ROUTER.carry_scale is not None
    torch.testing.assert_close(states, alone + ROUTER.carry_scale)
    first = next(iter(random_model(BASE).blocks)).router
    torch.testing.assert_close(route(tokens(), carried, first)[1], route(tokens(), None, first)[1])
