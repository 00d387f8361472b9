from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from megamoe.cuda import toolchain
from megamoe.cuda.cache import Cache
from megamoe.cuda.parallel import compile_all
from megamoe.cuda.report import FORBIDDEN_CODES, parse_log
from megamoe.cuda.toolchain import PINNED_NVRTC, Job, compile_kernel, nvrtc_version
from megamoe.errors import CompileError

# More values than 64 registers a thread hold (1024 threads leave no more).
SPILL = """
extern "C" __global__ void __launch_bounds__(1024, 1) spilling(float* p, int n) {
  float a[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) a[i] = p[i * 1024 + threadIdx.x];
  for (int k = 0; k < n; ++k) {
#pragma unroll
    for (int i = 0; i < 128; ++i) a[i] = a[i] * a[(i + 1) % 128] + p[k];
  }
#pragma unroll
  for (int i = 0; i < 128; ++i) p[i * 1024 + threadIdx.x] = a[i];
}
"""
# setmaxnreg without __launch_bounds__(threads, 1): ptxas ignores it, and says so in C7508.
C7508 = """
#include "ptx.cuh"
extern "C" __global__ void ignored(float* p) {
  ptx::setmaxnreg_inc<232>();
  p[threadIdx.x] = 1;
}
"""
GOOD = """
#include "config.cuh"
extern "C" __global__ void __launch_bounds__(128) good(float* p) {
  __shared__ float s[128];
  s[threadIdx.x] = p[threadIdx.x];
  __syncthreads();
  p[threadIdx.x] = s[127 - threadIdx.x] + config::kAdd;
}
"""


def kernel(directory: Path, text: str, name: str = "k.cu") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def test_the_compiler_is_the_pinned_one() -> None:
    assert nvrtc_version() == PINNED_NVRTC


def test_a_good_kernel_and_its_report(tmp_path: Path) -> None:
    for arch in toolchain.ARCHITECTURES:
        got = compile_kernel(kernel(tmp_path, GOOD), {"kAdd": 1}, arch, cache=Cache(None))
        assert got.cubin[:4] == b"\x7fELF"
        assert got.report.clean
        f = got.report.function("good")
        assert (f.entry, f.spills, f.stack, f.shared, f.barriers) == (True, False, 0, 512, 1)
        assert 4 <= f.registers <= 32
        assert (got.arch, got.nvrtc, got.cached) == (arch, PINNED_NVRTC, False)


@pytest.mark.parametrize(("text", "said"), [(SPILL, "spilling spills"), (C7508, "C7508")], ids=["spill", "C7508"])
def test_a_planted_fault_fails_the_build(tmp_path: Path, text: str, said: str) -> None:
    path, cache = kernel(tmp_path, text), Cache(tmp_path / "cache")
    for _ in range(2):  # compiled, and from the cache
        with pytest.raises(CompileError, match=said):
            compile_kernel(path, cache=cache)


@pytest.mark.parametrize("text", [SPILL, C7508], ids=["spill", "C7508"])
def test_another_compiler_warns_once_and_says_so_in_the_report(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: "13.99.1")
    toolchain._warn_once.cache_clear()
    path, cache = kernel(tmp_path, text), Cache(None)
    with pytest.warns(RuntimeWarning, match=r"NVRTC 13\.99\.1 compiles k\.cu"):
        assert not compile_kernel(path, cache=cache).report.clean
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not compile_kernel(path, cache=cache).report.clean
    with pytest.raises(CompileError):
        compile_kernel(path, cache=cache, policy="strict")


def test_an_error_shows_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"bad\.cu\(2\): error"):
        compile_kernel(kernel(tmp_path, "\nint x = ;\n", "bad.cu"), cache=Cache(None))
    many = "\n".join(f"int x{i} = y{i};" for i in range(200))
    with pytest.raises(CompileError, match="more lines") as caught:
        compile_kernel(kernel(tmp_path, many, "many.cu"), cache=Cache(None))
    assert len(str(caught.value).splitlines()) < 60
    with pytest.raises(CompileError, match="sm_90a or sm_100a"):
        compile_kernel(kernel(tmp_path, GOOD), {"kAdd": 1}, "sm_80", cache=Cache(None))


def test_the_key_changes_with_everything_that_changes_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kernel(tmp_path, '#include "part.cuh"\n' + GOOD)
    part = kernel(tmp_path, "// one\n", "part.cuh")
    cache = Cache(tmp_path / "cache")

    def compiled(add: int = 1, arch: str = "sm_90a") -> toolchain.Compiled:
        return compile_kernel(path, {"kAdd": add}, arch, cache=cache)

    first = compiled()
    again = compiled()
    assert again.cached
    assert (again.key, again.cubin, again.report) == (first.key, first.cubin, first.report)
    keys = {first.key, compiled(add=2).key, compiled(arch="sm_100a").key}
    part.write_text("// two\n")
    changed = compiled()
    assert not changed.cached
    keys.add(changed.key)
    monkeypatch.setattr("megamoe.__version__", "0.0.0")
    keys.add(compiled().key)
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: "13.0.99")
    keys.add(compiled().key)
    assert len(keys) == 6


def test_a_file_edited_while_it_compiles_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, run = kernel(tmp_path, GOOD), toolchain._run

    def edited(*arguments: object) -> object:
        result = run(*arguments)  # type: ignore[arg-type]
        path.write_text(GOOD + "// edited\n")
        return result

    cache = Cache(tmp_path / "cache")
    monkeypatch.setattr(toolchain, "_run", edited)
    compile_kernel(path, {"kAdd": 1}, cache=cache)
    assert not (tmp_path / "cache").exists()


def test_several_at_once(tmp_path: Path) -> None:
    path = kernel(tmp_path, GOOD)
    jobs = [Job(str(path), {"kAdd": i}) for i in range(5)]
    seen: list[toolchain.Compiled] = []
    got = compile_all(jobs, directory=tmp_path / "cache", workers=2, progress=seen.append)
    assert seen == got
    assert len({c.key for c in got}) == 5
    assert len(list((tmp_path / "cache").iterdir())) == 5
    alone = [compile_kernel(path, {"kAdd": i}, cache=Cache(None)).cubin for i in range(5)]
    assert [c.cubin for c in got] == alone
    bad = Job(str(kernel(tmp_path, SPILL, "bad.cu")))
    worse = Job(str(kernel(tmp_path, "int x = ;", "worse.cu")))
    with pytest.raises(CompileError, match=r"worse\.cu"):
        compile_all([*jobs, worse, bad], directory=tmp_path / "cache", workers=2)


def test_several_at_once_without_a_disk(tmp_path: Path) -> None:
    path = kernel(tmp_path, GOOD)
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="cannot write"):
        got = compile_all([Job(str(path), {"kAdd": i}) for i in range(3)], directory=tmp_path / "file", workers=2)
    assert len({c.cubin for c in got}) == 3


def test_reading_a_log() -> None:
    codes = sorted(FORBIDDEN_CODES)
    remarks = "\n".join(f"ptxas info    : ({c}) Potential Performance Loss: because of {c}." for c in codes)
    report = parse_log(
        f"""k.cu(17): warning #177-D: variable "unused" was declared but never referenced
{remarks}
ptxas info    : (C7999) Something new.
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'two' for 'sm_90a'
ptxas info    : Function properties for two
ptxas         .     256 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, used 1 barriers, 256 bytes cumulative stack size, 512 bytes smem
ptxas info    : Function properties for _Z1ffi
ptxas         .     0 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
"""
    )
    two, inner = report.functions
    assert (two.name, two.entry, two.registers, two.stack, two.shared, two.spills) == ("two", True, 30, 256, 512, False)
    assert (inner.name, inner.entry, inner.spill_stores, inner.spill_loads) == ("_Z1ffi", False, 12, 8)
    assert [w.code for w in report.warnings] == ["", *codes, "C7999"]
    assert len(report.violations) == 1 + len(codes)
    assert parse_log("").clean
    assert parse_log("ptxas info    : (C7999) Something new.").clean
    with pytest.raises(KeyError):
        report.function("absent")
