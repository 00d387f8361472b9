"""The simulator finds each fault it promises to find, names it, and stays silent about the kernels that are right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megamoe.cuda.driver import TensorMapSpec
from megamoe.sim.build import Kernel, build_all
from megamoe.sim.memory import Buffer, encode_tensor_map
from megamoe.sim.report import Report
from megamoe.sim.requirements import missing
from megamoe.sim.simulation import Launch, Simulation

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

HERE = Path(__file__).parent / "sim_kernels"
SHARED = 65536


@dataclass(frozen=True)
class Fault:
    """How to run a kernel, and what its report must say (None: nothing)."""

    file: str
    kernel: str
    says: str | None
    checked: bool = True
    grid: int = 1
    threads: int = 64
    cluster: int = 1
    shared: int = SHARED
    ranks: int = 1
    f_rank: int = 0
    f_peers: bool = True
    g_read_only: bool = False
    seeds: int = 3


def _sync(kernel: str, says: str | None, **how: object) -> Fault:
    return Fault("faults_sync.cu", kernel, says, **how)  # type: ignore[arg-type]


def _memory(kernel: str, says: str | None, **how: object) -> Fault:
    return Fault("faults_memory.cu", kernel, says, **how)  # type: ignore[arg-type]


def _flags(kernel: str, says: str | None, **how: object) -> Fault:
    return Fault("faults_flags.cu", kernel, says, **{"grid": 2, "threads": 32, **how})  # type: ignore[arg-type]


def _wgmma(kernel: str, says: str | None, **how: object) -> Fault:
    return Fault("faults_wgmma.cu", kernel, says, **{"threads": 128, **how})  # type: ignore[arg-type]


FAULTS = (
    _sync("uninitialised_mbarrier", "used before init", checked=False),
    _sync("overwritten_mbarrier", "used before init or overwritten", checked=False, threads=32),
    _sync("lost_arrival", "mbarrier mine (rank 0 cta 0) parity 0, phase 0, pending 1 of 2", checked=False),
    _sync("too_many_arrivals", "more arrivals than its count 2", checked=False),
    _sync("init_without_barrier", "its init is not ordered before this use"),
    _sync("test_wait_spin_that_never_ends", "phase of", checked=False),
    _sync("good_test_wait", None),
    _sync("collective_mismatch", "lanes of one warp are at different ones", checked=False, threads=32),
    _sync("warp_index_of_some_lanes", "lanes of one warp are at different ones", checked=False, threads=32),
    _sync("collective_without_exited_lanes", "lanes ffffffff, arrived 3fffffff", checked=False, threads=32),
    _sync("named_barrier_count_mismatch", "elsewhere", checked=False, threads=128),
    _sync("named_barrier_lost_warp", "named barrier 2, 96 of 128 arrived", checked=False, threads=128),
    _sync("good_named_barrier_arrive", None),
    _sync("read_before_arrive_only_barrier", "race: RACE"),
    _sync("registers_never_free", "registers: 232 wanted", checked=False, threads=384),
    _sync("good_registers", None, threads=384),
    _sync("cluster_barrier_missed", "cluster barrier, 96 of 128 arrived", checked=False, grid=2, cluster=2),
    _sync("arrive_at_exited_cta", "of a CTA that has exited", checked=False, grid=2, cluster=2, threads=32),
    _sync("good_cluster_handover", None, grid=4, cluster=2),
    _sync("plain_trap", "trap: trap", checked=False),
    _sync("intra_warp_race", "race: RACE", threads=32),
    _sync("good_intra_warp", None, threads=32),
    _sync("shuffle_orders_nothing", "race: RACE", threads=32),
    _sync("vote_orders_nothing", "race: RACE", threads=32),
    _sync("static_shared_race", "race: RACE"),
    _sync("good_static_shared", None, grid=5),
    _sync("good_bytes_of_one_word", None),
    _sync("good_collectives", None, threads=32),
    _sync("good_shared_counter", None, threads=96),
    _sync("shared_counter_without_barrier", "RACE of a plain and a relaxed access", seeds=10),
    _memory("shared_out_of_bounds", "OUT OF BOUNDS: 1-byte write", shared=4096),
    _memory("global_out_of_bounds", "OUT OF BOUNDS: 4-byte write of f, "),
    _memory("global_out_of_bounds", "past f was written", checked=False),
    _memory("global_far_out_of_bounds", "crash: access of", checked=False),
    _memory("another_ranks_memory", "LOCAL MEMORY OF ANOTHER RANK", f_rank=1, f_peers=False),
    _memory("write_to_read_only", "READ-ONLY MEMORY", g_read_only=True),
    _memory("null_pointer", "crash: access of", checked=False),
    _memory("mutable_global", "MUTABLE GLOBAL"),
    _memory("misaligned_vector", "misaligned address", checked=False),
    _memory("read_only_load_of_written_data", "WRITTEN IN THIS LAUNCH"),
    _memory("uninitialised_shared_is_nan", "trap: trap", checked=False),
    _memory("bulk_store_before_exit", "have not read shared memory", checked=False),
    _memory("bulk_store_out_of_bounds", "outside any buffer", checked=False),
    _memory("bulk_store_misaligned", "not 16-aligned", checked=False),
    _memory("bulk_source_reused", "OVERWRITTEN while in use", threads=32),
    _memory("good_bulk_source_reused", None, threads=32),
    _memory("bulk_store_of_another_thread_not_waited", "RACE with a copy"),
    _memory("cp_async_read_by_another_before_barrier", "race: RACE"),
    _memory("good_cp_async", None),
    _memory("cp_async_not_waited", "cp.async copies not waited for", checked=False),
    _memory("tma_destination_misaligned", "not 1024-aligned", checked=False),
    _memory("tma_not_a_map", "not a tensor map", checked=False),
    _memory("tma_barrier_without_init_fence", "missing fence_mbarrier_init"),
    _memory("tma_exit_while_loading", "exit", checked=False, seeds=10),
    _memory("tma_read_before_wait", "RACE with a copy"),
    _memory("generic_write_then_tma_overwrite", "MISSING PROXY FENCE"),
    _memory("good_tma_box", None),
    _flags("flag_cycle", "waits for flag f+4 == 0", checked=False),
    _flags("two_flags_never_set", "flag f+32 == 0, f+36 == 0", checked=False, grid=1),
    _flags("voting_spin", "livelock", checked=False, grid=1),
    _flags("good_fence_and_relaxed", None),
    _flags("relaxed_load_without_fence", "race: RACE"),
    _flags("relaxed_store_ends_a_release", "race: RACE"),
    _flags("good_counter_continues_a_release", None, grid=3),
    _flags("good_last_arriver", None, grid=6, threads=1),
    _flags("last_arriver_without_acquire", "race: RACE", grid=6, threads=1),
    _flags("good_tag_in_data", None, seeds=10),
    _flags("tag_of_one_word_only", "trap", checked=False, seeds=20),
    _flags("plain_read_of_tagged_data", "RACE of a plain and a relaxed access"),
    _flags("plain_write_of_a_flag", "RACE of a plain and a relaxed access"),
    _flags("gpu_scope_between_ranks", "SCOPE too narrow", grid=1, ranks=2),
    _flags("good_sys_scope_between_ranks", None, grid=1, ranks=2),
    _flags("good_transitive_release", None, grid=2, ranks=2),
    _flags("bulk_store_flag_without_full_wait", "RACE with a copy"),
    _flags("good_bulk_store_flag", None),
    _flags("shared_fence_for_global_data", "MISSING PROXY FENCE", grid=1),
    _flags("good_global_fence_for_global_data", None, grid=1),
    _wgmma("good_product", None),
    _wgmma("missing_proxy_fence", "MISSING PROXY FENCE"),
    _wgmma("missing_barrier", "race: RACE"),
    _wgmma("missing_wgmma_fence", "without wgmma_fence", checked=False),
    _wgmma("accumulator_written_in_flight", "accumulator written while wgmma was in flight", checked=False),
    _wgmma("accumulator_read_in_flight", "trap", checked=False),
    _wgmma("accumulator_written_after_fence", "accumulator written after its wgmma_fence"),
    _wgmma("exit_without_wait", "wgmma not waited for", checked=False),
    _wgmma("operands_overwritten_in_flight", "OVERWRITTEN while in use"),
    _wgmma("operands_differ", "operands differ between threads", checked=False),
    _wgmma("tile_misaligned", "not a 1024-aligned address", checked=False),
    _wgmma("operand_out_of_bounds", "outside shared memory", checked=False),
    _wgmma("wait_for_the_wrong_accumulator", "accumulator of wgmma_wait is still in flight", checked=False),
    _wgmma("another_width_in_flight", "an accumulator of another width", checked=False),
    _wgmma("good_two_in_flight", None),
    _wgmma("good_a_from_registers", None),
    _wgmma("good_matrices", None, threads=32),
    _wgmma("matrix_store_read_without_syncwarp", "race: RACE", threads=32),
)


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    build_all({(Kernel.of(HERE / f.file, "any"), f.checked) for f in FAULTS})


def _launch(sim: Simulation, fault: Fault) -> tuple[Launch, Buffer]:
    """g: 64 KB of small e4m3 codes for each rank, f: 4 KB of zero words that all ranks share; map: 60 rows of g."""
    codes = ((torch.arange(65536) * 37 + torch.arange(65536) // 128 * 11) % 0x70).to(torch.uint8)
    f = sim.buffer("f", torch.zeros(1024, dtype=torch.int32), rank=fault.f_rank, peers=fault.f_peers)
    arguments = []
    for rank in range(fault.ranks):
        g = sim.buffer("g", codes, rank=rank, read_only=fault.g_read_only)
        g.tensor[0] = rank
        shape = TensorMapSpec(g.address, "uint8", (128, 60), (128,), (128, 64))
        arguments.append([encode_tensor_map(shape), g, f])
    kernel = Kernel.of(HERE / fault.file, fault.kernel)
    return Launch(kernel, fault.grid, fault.threads, arguments, fault.cluster, fault.shared), f


def _reports(fault: Fault) -> Iterator[Report]:
    with Simulation(64 << 20) as sim:
        launch, _ = _launch(sim, fault)
        yield from sim.seeds([launch], range(fault.seeds), checked=fault.checked, step_limit=100_000)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.kernel}-{'checked' if f.checked else 'plain'}")
def test_fault(fault: Fault) -> None:
    for report in _reports(fault):
        if fault.says is None:
            assert report.ok, report
        elif fault.seeds <= 3:
            assert report.has(fault.says), report
    if fault.says is not None and fault.seeds > 3:  # a matter of luck, but not in so many seeds
        assert any(report.has(fault.says) for report in _reports(fault))


def test_every_kernel_has_its_line() -> None:
    wanted = {(f.file, f.kernel) for f in FAULTS} | {
        ("faults_memory.cu", "plain_spin"),
        ("faults_flags.cu", "deadline"),
    }
    from megamoe.sim.build import entries

    assert wanted == {(path.name, name) for path in HERE.glob("faults_*.cu") for name in entries(path)}


def test_a_plain_spin_is_ended_by_the_watchdog() -> None:
    fault = _memory("plain_spin", None, threads=32)
    with Simulation(64 << 20) as sim:
        launch, _ = _launch(sim, fault)
        report = sim.run([launch], watchdog=1)
        assert report.has("watchdog: no scheduling point"), report
        # The next run works again: a new worker.
        launch, _ = _launch(sim, _memory("good_cp_async", None))
        assert sim.run([launch]).ok


@pytest.mark.parametrize(("expiry", "ends"), [("never", False), ("deadlock", True), ("random", True)])
def test_deadlines_pass_when_the_options_say_so(expiry: str, ends: bool) -> None:
    with Simulation(64 << 20) as sim:
        launch, f = _launch(sim, _flags("deadline", None, grid=1))
        report = sim.run([launch], expiry=expiry, checked=True)  # type: ignore[arg-type]
        assert report.ok == ends, report
        assert bool(f.tensor[1]) == ends
        assert ends or report.has("deadlock")


def test_a_report_names_both_lines_and_their_callers() -> None:
    (report, *_) = _reports(_sync("intra_warp_race", None, threads=32))
    lines = (HERE / "faults_sync.cu").read_text().splitlines()
    start = next(i for i, line in enumerate(lines, 1) if " intra_warp_race(" in line)
    text = report.findings[0].text
    assert f"faults_sync.cu:{start + 3}" in text
    assert f"faults_sync.cu:{start + 4}" in text
