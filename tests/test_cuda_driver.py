"""The real driver class over bindings whose functions are replaced: the structures are the real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import megamoe.cuda.driver as driver_module
from megamoe.cuda.driver import LaunchConfig, Libcuda, TensorMapSpec, open_driver
from megamoe.errors import EngineError

bindings = pytest.importorskip("cuda.bindings.driver")
OK = bindings.CUresult.CUDA_SUCCESS


class Bindings:
    """The real bindings with `functions` in place of those that would call libcuda."""

    def __init__(self, **functions: Callable[..., tuple[Any, ...]]) -> None:
        self.calls: list[str] = []
        self._functions = {"cuInit": lambda flags: (OK,), **functions}

    def __getattr__(self, name: str) -> Any:
        if name in self._functions:
            self.calls.append(name)
            return self._functions[name]
        assert not name.startswith("cu"), f"{name} would call libcuda"
        return getattr(bindings, name)

    def __getattribute__(self, name: str) -> Any:
        # cuuint64_t and its like are types, not calls.
        if name.startswith("cuuint"):
            return getattr(bindings, name)
        return object.__getattribute__(self, name)


def contexts() -> tuple[dict[str, Callable[..., tuple[Any, ...]]], list[int]]:
    """Functions that keep a stack of contexts; the primary context of GPU i is 100 + i."""
    stack: list[int] = []

    def push(context: Any) -> tuple[Any, ...]:
        stack.append(int(context))
        return (OK,)

    def current() -> tuple[Any, ...]:
        return OK, bindings.CUcontext(stack[-1] if stack else 0)

    return {
        "cuDeviceGet": lambda i: (OK, bindings.CUdevice(i)),
        "cuDevicePrimaryCtxRetain": lambda device: (OK, bindings.CUcontext(100 + int(device))),
        "cuCtxPushCurrent": push,
        "cuCtxPopCurrent": lambda: (OK, bindings.CUcontext(stack.pop())),
        "cuCtxGetCurrent": current,
    }, stack


def attributes(config: Any) -> dict[str, bytes]:
    return {a.id.name: bytes(a.value.pad) for a in config.attrs}


def test_launch_attributes() -> None:
    plain = Libcuda(Bindings()).prepare(LaunchConfig(threads=384, dynamic_shared=1000), 5)
    assert plain.config.numAttrs == 0
    assert (plain.config.blockDimX, plain.config.sharedMemBytes) == (384, 1000)
    full = Libcuda(Bindings()).prepare(LaunchConfig(threads=1, cluster=4, dependent=True, cooperative=True), 5)
    found = attributes(full.config)
    assert full.config.numAttrs == 3
    assert found["CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION"][:12] == b"\4\0\0\0\1\0\0\0\1\0\0\0"
    assert found["CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"][0] == 1
    assert found["CU_LAUNCH_ATTRIBUTE_COOPERATIVE"][0] == 1


def test_launch_passes_what_it_is_given_and_translates_errors() -> None:
    seen: list[tuple[int, ...]] = []
    results = [OK, OK, bindings.CUresult.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, OK]

    def launch(config: Any, function: Any, arguments: int, extra: int) -> tuple[Any, ...]:
        seen.append((config.gridDimX, int(config.hStream), int(function), arguments, extra))
        return (results[len(seen) - 1],)

    driver = Libcuda(Bindings(cuLaunchKernelEx=launch))
    prepared = driver.prepare(LaunchConfig(threads=32), 77)
    driver.launch(prepared, 1234, 5, 9)
    driver.launch(prepared, 1234, 6, 0)
    with pytest.raises(EngineError, match=r"cuLaunchKernelEx: got CUDA_ERROR_COOPERATIVE.*Launch fewer blocks"):
        driver.launch(prepared, 1234, 7, 0)
    driver.launch(prepared, 1234, 7, 1)
    assert seen == [(5, 9, 77, 1234, 0), (6, 0, 77, 1234, 0), (7, 0, 77, 1234, 0), (7, 1, 77, 1234, 0)]


def test_contexts_are_pushed_and_popped_even_after_an_error() -> None:
    functions, stack = contexts()
    driver = Libcuda(Bindings(**functions))
    assert not driver.is_current(0)

    def fails_inside() -> None:
        with driver.use_device(1):
            assert stack == [101]
            assert driver.is_current(1)
            assert not driver.is_current(0)
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fails_inside()
    assert stack == []


def test_parameters_are_counted_in_the_context_of_the_gpu() -> None:
    functions, stack = contexts()
    sizes = [64, 128, 4]

    def info(kernel: Any, index: int) -> tuple[Any, ...]:
        assert stack == [102]
        if index >= len(sizes):
            return bindings.CUresult.CUDA_ERROR_INVALID_VALUE, None, None
        return OK, 0, sizes[index]

    driver = Libcuda(Bindings(**functions, cuKernelGetParamInfo=info))
    assert driver.parameter_sizes(5, 2) == sizes


@pytest.mark.parametrize(("limit", "wanted", "sets"), [(0, 0, []), (0, 5000, [5000]), (9000, 5000, [])])
def test_the_limit_of_shared_memory_only_rises(limit: int, wanted: int, sets: list[int]) -> None:
    functions, _ = contexts()
    given: list[int] = []

    def set_attribute(attribute: Any, value: int, kernel: Any, device: Any) -> tuple[Any, ...]:
        given.append(value)
        return (OK,)

    fake = Bindings(
        **functions,
        cuKernelGetAttribute=lambda *_: (OK, limit),
        cuKernelSetAttribute=set_attribute,
        cuKernelGetFunction=lambda kernel: (OK, bindings.CUfunction(1)),
    )
    Libcuda(fake).make_resident(5, 0, wanted)
    assert given == sets
    assert "cuKernelGetFunction" in fake.calls  # loaded now, not at the first launch


def test_tensor_maps_are_described_as_cuda_wants_them() -> None:
    seen: list[Any] = []

    def encode(*arguments: Any) -> tuple[Any, ...]:
        seen.extend(arguments)
        return OK, bindings.CUtensorMap()

    driver = Libcuda(Bindings(cuTensorMapEncodeTiled=encode))
    spec = TensorMapSpec(4096, "bfloat16", (64, 10, 3), (128, 1280), (64, 8, 1), swizzle=64)
    assert len(driver.encode_tensor_map(spec)) == 128
    assert seen[0] == bindings.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    assert seen[1:3] == [3, 4096]
    assert [[int(v) for v in values] for values in seen[3:7]] == [[64, 10, 3], [128, 1280], [64, 8, 1], [1, 1, 1]]
    assert seen[8] == bindings.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B


def test_no_driver_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> tuple[Any, ...]:
        raise RuntimeError("libcuda.so.1 not found")

    open_driver.cache_clear()
    monkeypatch.setattr("cuda.bindings.driver", Bindings(cuDriverGetVersion=absent))
    with pytest.raises(EngineError, match=r"no libcuda.*580"):
        open_driver()


def test_a_cuda_12_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    open_driver.cache_clear()
    monkeypatch.setattr("cuda.bindings.driver", Bindings(cuDriverGetVersion=lambda: (OK, 12080)))
    with pytest.raises(EngineError, match=r"got CUDA 12\.8; allowed: CUDA 13"):
        open_driver()


def test_a_driver_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    open_driver.cache_clear()
    none = bindings.CUresult.CUDA_ERROR_NO_DEVICE
    monkeypatch.setattr(
        "cuda.bindings.driver", Bindings(cuDriverGetVersion=lambda: (OK, 13000), cuInit=lambda flags: (none,))
    )
    with pytest.raises(EngineError, match=r"cuInit: got CUDA_ERROR_NO_DEVICE.*CUDA_VISIBLE_DEVICES"):
        open_driver()


def test_every_hint_names_a_real_error() -> None:
    names = [e.name for e in bindings.CUresult]
    for part in ("NO_DEVICE", "NO_BINARY_FOR_GPU", "COOPERATIVE_LAUNCH_TOO_LARGE", "OUT_OF_RESOURCES"):
        assert driver_module._way_out(next(n for n in names if part in n))
    assert driver_module._way_out("CUDA_ERROR_UNKNOWN") == ""
