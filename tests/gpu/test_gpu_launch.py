"""Loading, launching and the wrappers that staging uses, on a GPU."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch

from megamoe.cuda.driver import LaunchConfig as Config
from megamoe.cuda.driver import Libcuda, TensorMapSpec, open_driver
from megamoe.cuda.launch import Kernel, Library, TensorMap, TensorMaps, aligned
from megamoe.cuda.toolchain import compile_kernel
from megamoe.errors import EngineError
from megamoe.formats.fp8_block import to_e4m3

pytestmark = pytest.mark.gpu

PROBE = Path(__file__).parent / "launch_probe.cu"


class Arguments(ctypes.Structure):
    _fields_ = (("out", ctypes.c_uint64), ("in_", ctypes.c_uint64), ("count", ctypes.c_uint32))


@pytest.fixture(scope="module")
def driver() -> Libcuda:
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    return open_driver()


@pytest.fixture(scope="module")
def library(driver: Libcuda) -> Library:
    return Library(driver, compile_kernel(PROBE, arch=driver.device(0).arch))


def current() -> int:
    return torch.cuda.current_stream().cuda_stream


def test_wrappers_compute_what_they_say(library: Library) -> None:
    count = 128 * 600
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**32, 2 * count, dtype=np.uint64).astype(np.uint32)
    floats = (rng.standard_normal(2 * count) * 2.0 ** rng.integers(-14, 12, 2 * count)).astype(np.float32)
    bits[::2][: count // 2] = floats.view(np.uint32)[::2][: count // 2]
    bits[1::2][: count // 2] = floats.view(np.uint32)[1::2][: count // 2]
    words = torch.from_numpy(bits.view(np.int32)).cuda()
    out = torch.full((5, count), -1, dtype=torch.int32, device="cuda")
    a = aligned(Arguments)
    kernel = Kernel(library, "wrappers", 0, Config(threads=128, dependent=True), [a])
    a.out, a.in_, a.count = out.data_ptr(), words.data_ptr(), count
    kernel.launch(count // 128, current())
    got = out.cpu().numpy().view(np.uint32)

    first, second = bits[::2], bits[1::2]
    low = np.maximum(first & 0xFFFF, second & 0xFFFF)
    high = np.maximum(first >> 16, second >> 16)
    np.testing.assert_array_equal(got[0], low | (high << 16))
    e4m3 = to_e4m3(torch.from_numpy(bits.view(np.float32))).view(torch.uint8).numpy().astype(np.uint32)
    np.testing.assert_array_equal(got[1], e4m3[::2] | (e4m3[1::2] << 8))
    lanes = np.arange(count)
    np.testing.assert_array_equal(got[2], first[lanes ^ 5])
    np.testing.assert_array_equal(got[3], first[lanes // 32 * 32 + lanes * 7 % 32])
    np.testing.assert_array_equal(got[4], first ^ second)


@pytest.mark.parametrize(
    "config",
    [
        Config(threads=32, dynamic_shared=4096),
        Config(threads=32, dynamic_shared=200 << 10, cluster=2),
        Config(threads=32, dynamic_shared=64 << 10, cluster=8, dependent=True),
        Config(threads=32, dynamic_shared=64 << 10, cooperative=True),
        Config(threads=32, dynamic_shared=128 << 10, cluster=4, cooperative=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("captured", [False, True], ids=["plain", "graph"])
def test_shared_memory_clusters_and_attributes(library: Library, config: Config, captured: bool) -> None:
    blocks = 64
    out = torch.full((blocks, 2), -1, dtype=torch.int32, device="cuda")
    a = aligned(Arguments)
    kernel = Kernel(library, "shape", 0, config, [a])
    a.out, a.count = out.data_ptr(), config.dynamic_shared // 4
    torch.cuda.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernel.launch(blocks, current())
        a.out = a.count = 0  # the graph holds a copy of the arguments
        graph.replay()
    else:
        kernel.launch(blocks, current())
    index = np.arange(blocks)
    np.testing.assert_array_equal(out.cpu().numpy(), np.stack([index % config.cluster, index * 3 + 1], axis=1))
    assert 1 <= kernel.max_active_clusters() <= 132 * 32


def test_tensor_map_parameter(driver: Libcuda, library: Library) -> None:
    rows, columns = 200, 256
    source = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, device="cuda")
    out = torch.zeros(32 * 64, dtype=torch.uint8, device="cuda")
    a, m = aligned(Arguments), aligned(TensorMap)
    kernel = Kernel(library, "box", 0, Config(threads=32), [a, m])
    maps = TensorMaps(driver)
    spec = TensorMapSpec(source.data_ptr(), "uint8", (columns, rows), (columns,), (64, 32), swizzle=0)
    m.set(maps.tiled(spec))
    a.out, a.count = out.data_ptr(), 190  # the last rows of the box are outside and read as 0
    kernel.launch(1, current())
    want = torch.zeros(32, 64, dtype=torch.uint8)
    want[:10] = source.cpu()[190:, 64:128]
    assert torch.equal(out.cpu().view(32, 64), want)
    with pytest.raises(EngineError, match="cuTensorMapEncodeTiled"):
        maps.tiled(TensorMapSpec(source.data_ptr() + 1, "uint8", (columns, rows), (columns,), (64, 32)))


def test_errors_name_the_call_and_leave_the_process_usable(driver: Libcuda, library: Library) -> None:
    with pytest.raises(EngineError, match="CUDA_ERROR_NOT_FOUND"):
        library.kernel("absent")
    with pytest.raises(EngineError, match="drifted apart"):
        Kernel(library, "shape", 0, Config(threads=32), [aligned(TensorMap)])
    with pytest.raises(EngineError, match="shared memory of shape"):
        Kernel(library, "shape", 0, Config(threads=32, dynamic_shared=240 << 10), [aligned(Arguments)])
    with pytest.raises(EngineError, match="cuLibrary"):  # at once, or when the first kernel is asked for
        driver.kernel(driver.load(b"not a cubin" * 100), "shape")
    out = torch.full((64, 2), -1, dtype=torch.int32, device="cuda")
    a = aligned(Arguments)
    a.out, a.count = out.data_ptr(), 1024
    kernel = Kernel(library, "shape", 0, Config(threads=32, dynamic_shared=200 << 10, cooperative=True), [a])
    with pytest.raises(EngineError, match="COOPERATIVE_LAUNCH_TOO_LARGE"):
        kernel.launch(100_000, current())
    kernel.launch(64, current())
    assert torch.equal(out[:, 1].cpu(), torch.arange(64, dtype=torch.int32) * 3 + 1)


def test_a_library_can_be_unloaded(driver: Libcuda) -> None:
    mine = Library(driver, compile_kernel(PROBE, arch=driver.device(0).arch))
    mine.kernel("shape")
    mine.close()
    mine.close()
    with pytest.raises(EngineError, match="closed"):
        mine.kernel("shape")


def test_what_the_driver_says_about_the_gpu(driver: Libcuda) -> None:
    device, properties = driver.device(0), torch.cuda.get_device_properties(0)
    assert driver.version() >= 13000
    assert device.name == properties.name
    assert device.compute_capability == (properties.major, properties.minor)
    assert device.multiprocessors == properties.multi_processor_count
    assert device.memory_bytes == properties.total_memory
    assert device.uuid == f"GPU-{properties.uuid}"
    assert driver.is_current(0)
