"""How many blocks a rank's kernel has: from the number of SMs, whatever the GPU is called."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from engine_sim import World, world
from megamoe import MoESpec
from megamoe.errors import EngineError
from megamoe.sim.requirements import missing

pytestmark = pytest.mark.skipif(bool(missing()), reason="the simulator needs g++, AVX2 and FSGSBASE")

SPEC = MoESpec(hidden=256, intermediate=128, experts=4, topk=2)


@pytest.fixture
def sim() -> Iterator[World]:
    with world() as made:
        yield made


@pytest.mark.parametrize(
    ("name", "multiprocessors"),
    [("NVIDIA H20", 78), ("NVIDIA H100 PCIe", 114), ("NVIDIA H200", 132), ("An OEM's own name", 132)],
)
def test_blocks_follow_the_number_of_sms(
    sim: World, monkeypatch: pytest.MonkeyPatch, name: str, multiprocessors: int
) -> None:
    device = sim.driver.device
    monkeypatch.setattr(
        sim.driver, "device", lambda ordinal: replace(device(ordinal), name=name, multiprocessors=multiprocessors)
    )
    plans = set()
    for ranks, reserve in ((1, 0), (1, 12), (2, 0), (4, 5)):
        engine = sim.engine(SPEC, ranks, sm_reserve=reserve)
        assert [rank.grid for rank in engine._ranks] == [(multiprocessors - reserve) // ranks] * ranks
        plans.add(engine.plan_for(16))
    assert len(plans) == 1
    with pytest.raises(EngineError, match=rf"sm_reserve: got {multiprocessors}; .* on a GPU of {multiprocessors}"):
        sim.engine(SPEC, sm_reserve=multiprocessors)
