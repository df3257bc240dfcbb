# SPDX-License-Identifier: Apache-2.0
"""The replicas as a router knows them, however many Redis names."""

import asyncio

import httpx
import pytest

from app.cluster.router.directory import Directory
from app.cluster.router.metrics import RouterMetrics
from replicas.redis_registry import MOST_REPLICAS
from tests.cache.helpers import replica
from tests.support.registries import InProcessRegistry


class Probed:
    """Replicas of which some answer, and the most that were asked at once."""

    def __init__(self, *alive):
        self.alive = {each.url for each in alive}
        self.most = self.now = 0

    async def __call__(self, request):
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        self.now -= 1
        if str(request.url).removesuffix("/health") in self.alive:
            return httpx.Response(200)
        raise httpx.ConnectError("refused")


@pytest.fixture
def probed():
    return Probed(replica(1), replica(2))


@pytest.fixture
async def directory(probed):
    async with httpx.AsyncClient(transport=httpx.MockTransport(probed)) as client:
        yield Directory(InProcessRegistry(), client, RouterMetrics())


async def refreshed_with(directory, *replicas):
    registry = directory._registry = InProcessRegistry()
    for each in replicas:
        await registry.beat(each)
    await directory.refresh()


async def test_of_many_replicas_that_vanish_few_are_probed_at_once_and_those_that_answer_stay(directory, probed):
    true, false = [replica(1), replica(2)], [replica(number) for number in range(10, 400)]
    await refreshed_with(directory, *true, *false)
    assert len(directory.replicas) == len(true + false)
    numbers = []
    while len(directory.replicas) > len(true):
        await refreshed_with(directory)
        numbers.append(len(directory.replicas))
    assert directory.replicas == true
    assert probed.most == 64
    assert numbers == sorted(numbers, reverse=True)


async def test_those_that_are_known_stay_when_redis_names_more_than_the_router_takes(directory):
    true = [replica(1), replica(2)]
    await refreshed_with(directory, *true)
    for start in (10, 5000):
        await refreshed_with(directory, *(replica(start + number) for number in range(2 * MOST_REPLICAS)))
        assert {each.url for each in true} <= {each.url for each in directory.replicas}
        assert len(directory.replicas) == MOST_REPLICAS


async def test_a_replica_that_fails_while_others_are_probed_stays_suspected(directory, probed):
    await refreshed_with(directory, replica(1), replica(2), replica(3))
    directory.suspect(replica(3))
    refreshing = asyncio.create_task(directory.refresh())
    while not probed.now:
        await asyncio.sleep(0)
    directory.suspect(replica(1))
    await refreshing
    assert directory.replicas == [replica(2)]
    await directory.refresh()
    assert directory.replicas == [replica(1), replica(2)]
