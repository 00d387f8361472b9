from __future__ import annotations

import ctypes
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuda_fakes import FakeDriver, Launch, device_info
from megamoe.cuda.driver import LaunchConfig, TensorMapSpec
from megamoe.cuda.launch import Kernel, Library, TensorMap, TensorMaps, aligned, packer, raw_stream
from megamoe.cuda.report import Report
from megamoe.cuda.toolchain import Compiled
from megamoe.errors import EngineError

COMPILED = Compiled("k.cu", "sm_90a", b"\x7fELF...work\0...", Report(), "13.0.88", "key")


class Arguments(ctypes.Structure):
    _fields_ = (("pointer", ctypes.c_uint64), ("count", ctypes.c_uint32))


def fake(**changes: object) -> FakeDriver:
    return FakeDriver({"work": [16, 128]}, **changes)  # type: ignore[arg-type]


def kernel(driver: FakeDriver, config: LaunchConfig, ordinal: int = 0) -> tuple[Kernel, Arguments, TensorMap]:
    a, m = aligned(Arguments), aligned(TensorMap)
    return Kernel(Library(driver, COMPILED), "work", ordinal, config, [a, m]), a, m


def test_arguments_are_read_at_each_launch() -> None:
    driver = fake()
    k, a, m = kernel(driver, LaunchConfig(threads=64))
    for i in range(3):
        a.pointer, a.count = 1000 + i, i
        m.set(bytes([i]) * 128)
        k.launch(7 + i, 70 + i)
    assert [(x.grid, x.stream) for x in driver.launches] == [(7, 70), (8, 71), (9, 72)]
    for i, launch in enumerate(driver.launches):
        assert struct.unpack("<QI", launch.parameters[0][:12]) == (1000 + i, i)
        assert launch.parameters[1] == bytes([i]) * 128


def test_an_empty_grid_launches_nothing_and_a_bad_one_is_refused() -> None:
    driver = fake()
    k, _, _ = kernel(driver, LaunchConfig(threads=64, cluster=4))
    k.launch(0, 0)
    for grid in (6, -4, 2**31):
        with pytest.raises(EngineError, match="a multiple of 4"):
            k.launch(grid, 0)
    assert driver.launches == []
    k.launch(8, 0)
    assert len(driver.launches) == 1


def test_a_default_stream_means_the_kernels_own_gpu() -> None:
    driver = fake(devices=[device_info(0), device_info(1)], current=0)
    k, _, _ = kernel(driver, LaunchConfig(threads=64), ordinal=1)
    for stream in (0, 1, 2, 99):
        k.launch(1, stream)
    # A stream that somebody made knows its context; a default stream is that of the current one.
    assert [x.device for x in driver.launches] == [1, 1, 1, 0]
    assert driver.current == 0


def test_what_cannot_work_is_refused_when_it_is_loaded() -> None:
    driver = fake()
    library = Library(driver, COMPILED)
    a, m = aligned(Arguments), aligned(TensorMap)
    with pytest.raises(EngineError, match=r"structures of \[16\] bytes.*\[16, 128\]"):
        Kernel(library, "work", 0, LaunchConfig(threads=32), [a])
    with pytest.raises(EngineError, match="241000 bytes"):
        Kernel(library, "work", 0, LaunchConfig(threads=32, dynamic_shared=241000), [a, m])
    with pytest.raises(EngineError, match="NOT_FOUND"):
        library.kernel("absent")
    assert driver.resident == []
    Kernel(library, "work", 0, LaunchConfig(threads=32, dynamic_shared=200000), [a, m])
    assert driver.resident == [("work", 0, 200000)]
    library.close()
    library.close()
    assert driver.loaded == {}
    with pytest.raises(EngineError, match="closed"):
        library.kernel("work")


def test_a_failed_launch_leaves_the_kernel_usable() -> None:
    failing = True

    def run(launch: Launch) -> None:
        if failing:
            raise EngineError("cuLaunchKernelEx", "CUDA_ERROR_UNKNOWN", "CUDA_SUCCESS")

    driver = fake(run=run, current=None)
    k, _, _ = kernel(driver, LaunchConfig(threads=32))
    with pytest.raises(EngineError), k.lock:
        k.launch(1, 0)
    failing = False
    assert driver.current is None
    with k.lock:
        k.launch(1, 0)


@pytest.mark.parametrize("alignment", [16, 64, 128])
def test_alignment(alignment: int) -> None:
    held = [aligned(Arguments, alignment) for _ in range(20)]
    assert all(ctypes.addressof(a) % alignment == 0 for a in held)
    assert all(bytes(a) == bytes(16) for a in held)


class Mixed(ctypes.Structure):
    _fields_ = (
        ("a", ctypes.c_uint8),
        ("b", ctypes.c_uint64),
        ("c", ctypes.c_int16),
        ("d", ctypes.c_int32),
        ("e", ctypes.c_float),
        ("f", ctypes.c_int64),
        ("g", ctypes.c_uint32),
    )


@given(
    st.tuples(
        st.integers(0, 2**8 - 1),
        st.integers(0, 2**64 - 1),
        st.integers(-(2**15), 2**15 - 1),
        st.integers(-(2**31), 2**31 - 1),
        st.floats(width=32, allow_nan=False),
        st.integers(-(2**63), 2**63 - 1),
        st.integers(0, 2**32 - 1),
    )
)
def test_packing_writes_each_field_where_c_puts_it(values: tuple[object, ...]) -> None:
    packed, one_by_one = aligned(Mixed), aligned(Mixed)
    packer(packed)(*values)
    for (name, _), value in zip(Mixed._fields_, values, strict=True):
        setattr(one_by_one, name, value)
    assert bytes(packed) == bytes(one_by_one)


def test_tensor_maps_are_encoded_once_and_forgotten_in_order() -> None:
    driver = fake()
    maps = TensorMaps(driver, capacity=2)
    specs = [TensorMapSpec(p, "uint8", (128, 4), (128,), (128, 4)) for p in (16, 32, 48)]
    first = maps.tiled(specs[0])
    assert maps.tiled(TensorMapSpec(16, "uint8", (128, 4), (128,), (128, 4))) is first
    maps.tiled(specs[1])
    maps.tiled(specs[0])
    maps.tiled(specs[2])  # specs[1] was used longest ago
    assert driver.encoded == specs
    maps.tiled(specs[0])
    assert len(driver.encoded) == 3
    maps.tiled(specs[1])
    assert len(driver.encoded) == 4


def test_streams() -> None:
    class Stream:
        cuda_stream = 44

    assert raw_stream(12, 0) == 12
    assert raw_stream(Stream(), 0) == 44  # type: ignore[arg-type]
