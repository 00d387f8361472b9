from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.cuda.cache import Cache
from megamoe.cuda.sources import CONFIG_HEADER, KERNELS, config_header, include_dirs, source_digest
from megamoe.cuda.toolchain import compile_kernel
from megamoe.errors import CompileError

VALUES = st.one_of(
    st.booleans(),
    st.integers(-(2**63) + 1, 2**63 - 1),
    st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False),
)


@settings(max_examples=12, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=40))
def test_the_compiler_sees_every_value_exactly(tmp_path_factory: pytest.TempPathFactory, values: list[object]) -> None:
    config = {f"v{i}": v for i, v in enumerate(values)}
    checks = []
    for name, v in config.items():
        if isinstance(v, float):
            checks.append(f"static_assert(config::{name} == {v!r}, {name!r});".replace("'", '"'))
        else:
            text = str(v).lower() if isinstance(v, bool) else f"{v}ll"
            checks.append(f'static_assert(config::{name} == {text}, "{name}");')
    path = tmp_path_factory.mktemp("kernel") / "values.cu"
    path.write_text(f'#include "{CONFIG_HEADER}"\n' + "\n".join(checks) + '\nextern "C" __global__ void k() {}\n')
    compile_kernel(path, config, cache=Cache(None))  # type: ignore[arg-type]


def test_a_wrong_value_would_be_seen(tmp_path: Path) -> None:
    path = tmp_path / "values.cu"
    path.write_text('#include "config.cuh"\nstatic_assert(config::a == 4, "a");\nextern "C" __global__ void k() {}\n')
    with pytest.raises(CompileError, match="static assertion"):
        compile_kernel(path, {"a": 3}, cache=Cache(None))


def test_the_header_does_not_depend_on_the_order() -> None:
    assert config_header({"b": 1, "a": True}) == config_header({"a": True, "b": 1})
    assert config_header({"a": 1}) != config_header({"a": True})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("a b", 1), ("1a", 1), ("a;", 1), ("", 1), ("a\n", 1)),
        *(("a", v) for v in ("text", None, 2**63, float("nan"), float("inf"))),
    ],
)
def test_what_is_no_constant_is_refused(name: str, value: object) -> None:
    with pytest.raises(CompileError, match="config"):
        config_header({name: value})  # type: ignore[dict-item]


def test_the_digest_covers_what_is_included(tmp_path: Path) -> None:
    other = tmp_path / "headers"
    other.mkdir()
    main = tmp_path / "k.cu"
    main.write_text(
        '#include "near.cuh"\n  #  include <far.cuh>\n#if 0\n#include "off.cuh"\n#endif\n#include <nowhere.h>\n'
    )
    for name, text in (("near.cuh", '#include "deep/er.cuh"\n'), ("off.cuh", "3\n")):
        (tmp_path / name).write_text(text)
    (other / "far.cuh").write_text('#include "near.cuh"\n')
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "er.cuh").write_text('#include "near.cuh"\n')  # a cycle

    def digest() -> str:
        return source_digest(main, [tmp_path, other])

    first = digest()
    assert digest() == first
    seen = {first}
    for path in (main, tmp_path / "near.cuh", other / "far.cuh", tmp_path / "deep" / "er.cuh", tmp_path / "off.cuh"):
        path.write_text(path.read_text() + "// changed\n")
        seen.add(digest())
    (other / "nowhere.h").write_text("")
    seen.add(digest())
    assert len(seen) == 7


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"absent\.cu"):
        compile_kernel("absent.cu", cache=Cache(tmp_path))


def test_kernels_and_cuda_headers_are_found() -> None:
    assert include_dirs()[0] == KERNELS
    assert any((d / "cuda_fp8.h").is_file() for d in include_dirs())
