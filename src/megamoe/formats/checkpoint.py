"""Expert layers out of Hugging Face safetensors directories.

Stored formats, told apart by the dtype of the weights:

=========  ==========================  ==================================================================
format     weight dtype                scales accepted
=========  ==========================  ==================================================================
fp8_block  F8_E4M3 ``[N, K]``          ``[N/128, K/128]`` F32 or BF16 (read as float32), F8_E8M0, or U8
                                       exponent bytes when config.json says ``scale_fmt: "ue8m0"``
mxfp4      U8, I8 ``[N, K/2]`` or F4   ``[N, K/32]`` F8_E8M0, U8 exponent bytes, or F32 powers of two
           ``[N, K]``
bf16       BF16 ``[N, K]``             none
=========  ==========================  ==================================================================

Names are those of `megamoe.formats.names`; sizes and the clamp come from ``config.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch

from megamoe.errors import CheckpointError, FormatError, WeightError
from megamoe.formats import config as configuration
from megamoe.formats import names as naming
from megamoe.formats import ue8m0
from megamoe.formats.convert import (
    ProgressCallback,
    check_conversion,
    convert_matrix,
    copy_bytes,
    empty_weights,
    located,
)
from megamoe.formats.shards import Reader, StoredTensor, read_json, weight_map
from megamoe.spec import BLOCK, MXFP4_GROUP, MoESpec, ScaleFormat, WeightFormat
from megamoe.weights import ExpertWeights

__all__ = ["Checkpoint", "checkpoint"]

_FORMAT_OF: Final[dict[str, WeightFormat]] = {
    "F8_E4M3": "fp8_block",
    "U8": "mxfp4",
    "I8": "mxfp4",
    "F4": "mxfp4",
    "BF16": "bf16",
}


@dataclass(frozen=True)
class Checkpoint:
    """One expert layer of a checkpoint directory; no file is kept open. Made by `checkpoint`.

    Attributes:
        path: the directory.
        layer: number of the layer.
        spec: sizes, clamp and input scales from ``config.json``.
        stored_format: format of the layer's experts on disk.
        format: format that `read` returns.
        moe_layers: all layers of the model that have routed experts.
        scale_format: kind of the fp8_block scales that `read` returns; None for other formats.
        config: the whole ``config.json``.
    """

    path: Path
    layer: int
    spec: MoESpec
    stored_format: WeightFormat
    format: WeightFormat
    moe_layers: tuple[int, ...]
    scale_format: ScaleFormat | None
    config: Mapping[str, Any] = field(repr=False)
    _files: Mapping[str, str] = field(repr=False)
    _names: naming.LayerNames = field(repr=False)

    def read(
        self,
        first_expert: int = 0,
        count: int | None = None,
        device: torch.device | str = "cpu",
        progress: ProgressCallback | None = None,
    ) -> ExpertWeights:
        """Read the experts ``[first_expert, first_expert + count)`` and nothing else.

        Files are memory-mapped and copied (or converted) projection by projection into tensors that are allocated
        once. The peak is the result and about 32 MiB: 16 MiB of mapped pages, one projection, strips of a conversion.
        Files that hold only other experts are not opened. Scales are checked, the weights' own values are not looked
        at (a NaN byte among e4m3 weights stays one).

        Args:
            first_expert: first expert to read.
            count: number of experts; None reads to the last.
            device: where the result lives.
            progress: called after each expert with (bytes done, bytes in all) of the result; see
                `megamoe.formats.progress.reading_bar`.

        Returns:
            `ExpertWeights` in `format`, checked against `spec`.

        Raises:
            CheckpointError: the range is outside the layer, a file is missing or damaged, a tensor has a wrong dtype or
                shape, or a scale is NaN, infinite, zero or negative: the message names file, tensor and block.
            FormatError, WeightError: a conversion that was asked for is not possible; names the same.
        """
        experts = self.spec.experts
        if count is None:
            count = experts - first_expert
        if not 0 <= first_expert <= experts or not 0 <= count <= experts - first_expert:
            raise CheckpointError(
                "first_expert, count", f"{first_expert}, {count}", f"a range within [0, {experts})", "Check the rank."
            )
        scale_dtype = ue8m0.E8M0 if self.scale_format == "ue8m0" else torch.float32
        result = empty_weights(
            self.spec, self.format, count, first_expert=first_expert, scale_dtype=scale_dtype, device=device
        )
        total = result.nbytes
        with Reader(self.path, self._files) as reader:
            for i in range(count):
                for projection in self._names.projections:
                    self._read_one(reader, first_expert + i, projection, result, i)
                if progress is not None:
                    progress(total * (i + 1) // count, total)
        result.check(self.spec, count)
        return result

    def _read_one(
        self, reader: Reader, expert: int, projection: naming.Projection, result: ExpertWeights, slot: int
    ) -> None:
        rows, columns = _shape(self.spec, projection)
        key = self._names.key(expert, projection)
        name = self._names.weights[key]
        index = expert if self._names.fused else None
        weight = _load_weight(reader.stored(name), self.stored_format, (rows, columns), index, self.spec.experts)
        nbytes = weight.numel() * weight.element_size()
        scale: torch.Tensor | None = None
        if self.stored_format != "bf16":
            stored = reader.stored(self._names.scales[key])
            bytes_are_exponents = self.stored_format == "mxfp4" or configuration.scales_are_ue8m0(self.config)
            grid = (rows // BLOCK, columns // BLOCK)
            if self.stored_format == "mxfp4":
                grid = (rows, columns // MXFP4_GROUP)
            scale = _load_scale(stored, self.stored_format, grid, index, self.spec.experts, bytes_are_exponents)
            if self.stored_format == self.format and result.w2_scale is not None:
                _check_kind(stored, scale.dtype, result.w2_scale.dtype)
        try:
            weight, scale = convert_matrix(
                weight, scale, self.stored_format, self.format, self.scale_format or "float32"
            )
        except (FormatError, WeightError) as error:
            where = reader.label(name) + (f"[{index}]" if index is not None else "")
            raise located(error, where) from error
        # Rows of up follow the rows of gate; a fused tensor already holds both.
        skip = self.spec.intermediate if projection == "up" else 0
        target, target_scale = (result.w2, result.w2_scale) if projection == "down" else (result.w13, result.w13_scale)
        copy_bytes(target[slot, skip : skip + weight.shape[0]], weight)
        if scale is not None and target_scale is not None:
            skip //= BLOCK if self.format == "fp8_block" else 1
            copy_bytes(target_scale[slot, skip : skip + scale.shape[0]], scale)
        del weight, scale  # views of the mapped file must be gone before it is unmapped
        reader.count(nbytes)


def checkpoint(
    path: str | PathLike[str],
    layer: int,
    *,
    convert_to: WeightFormat | None = None,
    scale_format: ScaleFormat = "float32",
) -> Checkpoint:
    """Open one expert layer of a Hugging Face checkpoint directory; reads headers and names, no weights.

    Args:
        path: directory with ``config.json`` and safetensors files (one, or sharded with an index).
        layer: number of the layer in the tensor names (``model.layers.<layer>``).
        convert_to: format to convert to while reading: ``"fp8_block"`` quantises BF16 experts and converts MXFP4 ones
            exactly (or refuses), ``"bf16"`` dequantises. None keeps the stored format.
        scale_format: of the fp8_block scales that a conversion makes.

    Raises:
        CheckpointError: no checkpoint there, a dense layer, missing or surplus experts, or a format, activation or
            quantisation scheme that the engines do not compute.
        FormatError: the experts' sizes do not fit the format, or the conversion does not exist.
        SpecError: ``config.json`` describes a layer that cannot exist.
    """
    directory = Path(path)
    files = weight_map(directory)
    config = read_json(directory / "config.json")
    layers = naming.expert_layers(files)
    if layer not in layers or isinstance(layer, bool):
        raise CheckpointError("layer", layer, f"a layer with routed experts: {_ranges(layers)}", "Pick one of these.")
    spec = configuration.spec_from_config(config)
    found = naming.find_layer(files, layer, spec.experts)
    with Reader(directory, files) as reader:
        stored_format, scale_dtype = _stored_format(reader, found)
    _check_scales_present(found, stored_format, layer)
    if stored_format == "fp8_block":
        configuration.check_fp8_config(config)
    spec.check_format(stored_format)
    wanted = stored_format if convert_to is None else convert_to
    check_conversion(stored_format, wanted)
    spec.check_format(wanted)
    kind: ScaleFormat | None = None
    if wanted == "fp8_block":
        stored_kind: ScaleFormat = "ue8m0" if scale_dtype in ("F8_E8M0", "U8") else "float32"
        kind = stored_kind if stored_format == wanted else scale_format
    count = configuration.hidden_layers(config)
    return Checkpoint(
        path=directory,
        layer=layer,
        spec=spec,
        stored_format=stored_format,
        format=wanted,
        moe_layers=tuple(n for n in layers if count is None or n < count),
        scale_format=kind,
        config=config,
        _files=files,
        _names=found,
    )


def _shape(spec: MoESpec, projection: naming.Projection) -> tuple[int, int]:
    """Rows and columns (logical elements) of one expert's projection."""
    if projection == "down":
        return spec.hidden, spec.intermediate
    return spec.intermediate * (2 if projection == "gate_up" else 1), spec.hidden


def _stored_format(reader: Reader, found: naming.LayerNames) -> tuple[WeightFormat, str | None]:
    """Weight format and scale dtype, by the first expert whose files are here: a rank may have fetched only its own."""
    keys = sorted(found.weights)
    here = (k for k in keys if all(map(reader.available, filter(None, (found.weights[k], found.scales.get(k))))))
    key = next(here, keys[0])
    stored = reader.stored(found.weights[key])
    if stored.dtype not in _FORMAT_OF:
        raise CheckpointError(
            stored.label,
            f"dtype {stored.dtype}",
            ", ".join(f"{dtype} ({name})" for dtype, name in _FORMAT_OF.items()),
            "Convert the checkpoint to BF16, FP8 128x128 or MXFP4.",
        )
    scale_name = found.scales.get(key)
    return _FORMAT_OF[stored.dtype], None if scale_name is None else reader.stored(scale_name).dtype


def _check_scales_present(found: naming.LayerNames, stored_format: WeightFormat, layer: int) -> None:
    if stored_format == "bf16" and found.scales:
        name = min(found.scales.values())
        raise CheckpointError(f"layer {layer}", f"BF16 weights with scales ({name!r})", "no scales", "Check the files.")
    if stored_format != "bf16" and not found.scales:
        raise CheckpointError(
            f"layer {layer}",
            f"{stored_format} weights without scales",
            "a scale tensor beside each weight (.weight_scale_inv, .weight_scale or .scale)",
            "Download the checkpoint again.",
        )


def _load_weight(
    stored: StoredTensor,
    stored_format: WeightFormat,
    shape: tuple[int, int],
    index: int | None,
    experts: int,
) -> torch.Tensor:
    """A mapped view of one expert's weight, as `ExpertWeights` wants it."""
    allowed = [dtype for dtype, name in _FORMAT_OF.items() if name == stored_format]
    if stored.dtype not in allowed:
        raise CheckpointError(
            stored.label, f"dtype {stored.dtype}", f"{' or '.join(allowed)}, like its layer", "Check the files."
        )
    rows, columns = shape
    packed = stored_format == "mxfp4"
    _check_shape(stored, (rows, columns // 2 if packed and stored.dtype != "F4" else columns), index, experts)
    tensor = stored.view()
    if packed:
        tensor = tensor.view(torch.uint8)
    return tensor if index is None else tensor[index]


def _load_scale(
    stored: StoredTensor,
    stored_format: WeightFormat,
    grid: tuple[int, int],
    index: int | None,
    experts: int,
    bytes_are_exponents: bool,
) -> torch.Tensor:
    """One expert's scales, checked: float32 or e8m0 for fp8_block, e8m0 for mxfp4."""
    allowed = ["F8_E8M0", "F32"] + (["BF16"] if stored_format == "fp8_block" else [])
    if bytes_are_exponents:
        allowed.append("U8")
    if stored.dtype not in allowed:
        way_out = "Check the files."
        if stored.dtype == "U8":
            way_out = 'If these bytes are UE8M0 exponents, quantization_config must say scale_fmt: "ue8m0".'
        raise CheckpointError(stored.label, f"dtype {stored.dtype}", " or ".join(allowed), way_out)
    _check_shape(stored, grid, index, experts)
    scale = stored.view()
    if index is not None:
        scale = scale[index]
    if stored.dtype in ("F8_E8M0", "U8"):
        byte = scale.view(torch.uint8)
        _check_scales(stored, index, byte == 0xFF, scale)
        return byte.view(ue8m0.E8M0)
    scale = scale.float()
    _check_scales(stored, index, ~((scale > 0) & scale.isfinite()), scale)
    if stored_format == "fp8_block":
        return scale
    try:
        return ue8m0.encode(scale)
    except FormatError as error:
        raise CheckpointError(
            f"{stored.label}: {error.argument}", error.given, "a power of two (MXFP4 scales)", "Check the files."
        ) from error


def _check_scales(stored: StoredTensor, index: int | None, bad: torch.Tensor, scale: torch.Tensor) -> None:
    if bool(bad.any()):
        block = [int(i) for i in bad.nonzero()[0]]
        value = float(scale.float()[tuple(block)]) if scale.dtype != torch.uint8 else float("nan")
        where = stored.label if index is None else f"{stored.label}[{index}]"
        raise CheckpointError(
            where,
            f"{value} in block {block} ({int(bad.sum())} such blocks)",
            "finite scales above 0",
            "The checkpoint is damaged: download it again.",
        )


def _check_kind(stored: StoredTensor, dtype: torch.dtype, wanted: torch.dtype) -> None:
    if dtype != wanted:
        kinds = {torch.float32: "values (F32, BF16)", ue8m0.E8M0: "exponents (F8_E8M0, U8)"}
        raise CheckpointError(
            stored.label,
            f"dtype {stored.dtype}",
            f"scale {kinds[wanted]}, like others of its layer",
            "Check the files.",
        )


def _check_shape(stored: StoredTensor, shape: tuple[int, int], index: int | None, experts: int) -> None:
    want = shape if index is None else (experts, *shape)
    if stored.shape != want:
        raise CheckpointError(
            stored.label,
            f"shape {list(stored.shape)}",
            f"{list(want)}, from config.json",
            "Check that config.json belongs to these files; transposed or interleaved experts are not read.",
        )


def _ranges(numbers: tuple[int, ...]) -> str:
    """``3-5, 7`` for (3, 4, 5, 7); ``none`` for ()."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"
