"""The options of an export, with their checks."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from partita.capped import is_number
from partita.dtypes import ACTIVATIONS, CACHE_PRECISIONS, EXACT, PRECISIONS, Precision, multiplied_with
from partita.errors import CheckpointError, UsageError
from partita.export.quantise import rounders as quantisers
from partita.export.quantise.keep import read_keep
from partita.export.trace.attention import GROWING, lowering
from partita.options.export import ExportOptions as Options
from partita.options.fields import checked
from partita.package.contract import CONTEXT_LENGTHS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from partita.export.checkpoint.description import Checkpoint

DEFAULT_MAX_LENGTH = 2048
DEFAULT_PREFILL_CHUNK = 128
RECURRENT_PREFILL_CHUNK = 16
"""Smaller, because these models cannot pad a chunk: the rest of a prompt runs token by token."""
INTEGERS = "int8"
"""Activations that the graph quantises."""
CACHE_LOWERING = "gqa"
"""The lowering of attention that supports an int8 or window cache."""
FIXED = "fixed"
WINDOW = "window"
BLOCK_SIZES = (32, 64, 128)
"""Possible numbers of weights per scale."""
ADAPTER_NAME = "[A-Za-z0-9][A-Za-z0-9_-]{0,63}"
"""It becomes part of file names."""
AUTO = "auto"
PACKED = "int4"
"""A possible value of `auto`: options of quantised weights are allowed with it."""
OLDEST_OPSET = 18
"""The minimum that torch writes."""
MAX_OPSET = 24
"""Highest operator set that the pinned torch exporter writes."""


class ExportOptions(Options):
    """The options of an export, and values derived from them."""

    @property
    def folder(self) -> Path:
        """Folder of the package."""
        return Path(self.out)

    @property
    def named(self) -> str:
        """The name of the precision; a float precision while `auto` is not settled."""
        return EXACT.name if self.precision == AUTO else self.precision

    @property
    def reads(self) -> tuple[str, ...]:
        """Folders that are read, as given."""
        adapters = (self.with_adapters or {}).values()
        return tuple(os.fspath(path) for path in (self.checkpoint, self.adapter, *adapters) if path is not None)

    @property
    def computing(self) -> Precision:
        """The precision of the package. Raises KeyError for an unknown name."""
        found = PRECISIONS[self.named]
        if found.bits is None and found is not EXACT and self.activations == "fp32":
            return replace(found, dtype=EXACT.dtype, twin=None, stored=found.dtype)
        return found if found.bits is None else replace(found, dtype=ACTIVATIONS[self.activations or "fp32"])

    @property
    def rounds(self) -> bool:
        """Whether weights or the cache are quantised to integers."""
        return self.computing.bits is not None or self.cache_precision is not None

    @property
    def measures(self) -> bool:
        """Whether anything is rounded, so that the quality must be measured."""
        return self.rounds or self.computing is not EXACT

    @property
    def searches(self) -> bool:
        """Whether the bits of weights are searched."""
        return self.max_perplexity_ratio is not None or self.max_weight_size is not None

    @property
    def rounding(self) -> str:
        """The quantiser."""
        return self.quantiser or (quantisers.DEFAULT if self.calibrate is None else quantisers.CALIBRATED)


def check_options(options: ExportOptions) -> None:
    """Check the options without a checkpoint. Raises UsageError."""
    checked(options)
    if options.named not in PRECISIONS:
        names = ", ".join((AUTO, *PRECISIONS))
        raise UsageError(f"`precision={options.precision}`: choose one of {names}")
    if options.prefill_chunk is not None and not options.static_shapes:
        raise UsageError("`prefill_chunk` fixes the shape of prefill.onnx, so it needs `static_shapes=True`")
    if options.verify_length is not None and not options.verify:
        raise UsageError("`verify_length` has no effect with `verify=False`; omit one of them")
    _check_adapters(options)
    _check_layout(options)
    _check_cache(options)
    _check_packing(options)
    if options.without_pass:
        from partita.export.passes import check_left_out

        check_left_out(options.without_pass)
    if options.attention != "auto":
        chosen = lowering(options.attention)
        if options.opset is not None and options.opset < chosen.min_opset:
            raise UsageError(
                f"`opset={options.opset}`: `attention={chosen.name}` needs opset {chosen.min_opset} or newer"
            )
    if options.opset is not None and not OLDEST_OPSET <= options.opset <= MAX_OPSET:
        raise UsageError(f"`opset={options.opset}`: must be between {OLDEST_OPSET} and {MAX_OPSET}")


def _check_adapters(options: ExportOptions) -> None:
    """Check the options of adapters. Raises UsageError."""
    said = "`with_adapters`"
    if options.adapter is not None and options.with_adapters:
        raise UsageError(
            f"{said} keeps adapters separate from the weights, but `adapter` merges one; choose one of them"
        )
    if options.with_adapters and options.prefill_precision is not None:
        raise UsageError(
            f"{said} and `prefill_precision={options.prefill_precision}` cannot be combined, because "
            "prompts would use separate weights; omit one of them"
        )
    names = list(options.with_adapters or {})
    files = [name.casefold() for name in names]  # some file systems ignore case
    for name in names:
        if not re.fullmatch(ADAPTER_NAME, name):
            raise UsageError(
                f"{said}: {name[:80]!r} is not a valid adapter name: use at most 64 letters, digits, - and _"
            )
        if files.count(name.casefold()) > 1:
            raise UsageError(f"{said}: {name} is set twice; set it once (case is ignored)")


def with_layout(options: ExportOptions) -> ExportOptions:
    """The options with the lowering that the cache layout requires."""
    lowerings = {FIXED: options.attention, WINDOW: CACHE_LOWERING, GROWING: GROWING}
    return replace(options, attention=lowerings[options.cache])


def _check_layout(options: ExportOptions) -> None:
    """Check the options of the cache layout. Raises UsageError."""
    said = f"`cache={options.cache}`"
    if options.cache == FIXED:
        if options.attention == GROWING:
            raise UsageError(f"`attention={GROWING}`: use `cache={GROWING}`")
        return
    only = with_layout(options).attention
    others = {
        f"`attention={options.attention}`": options.attention not in ("auto", only),
        "`static_shapes=True`": options.static_shapes,
        f"`cache_precision={options.cache_precision}`": options.cache_precision is not None,
        f"`prefill_precision={options.prefill_precision}`": options.cache == GROWING
        and options.prefill_precision is not None,
    }
    for other, given in others.items():
        if given:
            raise UsageError(f"{said}: this layout does not support {other}; omit one of them")


def _check_cache(options: ExportOptions) -> None:
    """Check the cache precision. Raises UsageError."""
    if options.cache_precision is None:
        return
    said = f"`cache_precision={options.cache_precision}`"
    if options.cache_precision not in CACHE_PRECISIONS:
        raise UsageError(f"{said}: choose one of {', '.join(CACHE_PRECISIONS)}, or omit it")
    if options.attention not in ("auto", CACHE_LOWERING):
        raise UsageError(
            f"{said}: `attention={options.attention}` keeps its cache in floats; use `attention={CACHE_LOWERING}`"
        )
    if options.computing.twin is not None:
        raise UsageError(
            f"{said}: cannot be verified with {options.computing.dtype} activations; add `activations=fp32`"
        )
    if not options.verify:
        raise UsageError(f"{said} requires a quality measurement with the source model: omit `verify=False`")


def _check_packing(options: ExportOptions) -> None:
    """Check the options of quantised weights. Raises UsageError."""
    known = options.precision != AUTO  # `auto` is checked again when the checkpoint settles it
    allowed = multiplied_with(PRECISIONS[options.named if known else PACKED])
    if options.activations is not None and options.activations not in allowed:
        raise UsageError(
            f"`activations={options.activations}`: with `precision={options.precision}` choose {' or '.join(allowed)}"
        )
    quantisers.check_name(options.rounding)
    read_keep(
        tuple((options.keep or {}).items()),
        options.named if known else PACKED,
        options.computing.dtype if known else EXACT.dtype,
    )
    if options.computing.bits is None:
        for name, value in (
            ("block_size", options.block_size),
            ("quantiser", options.quantiser),
            ("calibrate", options.calibrate),
            ("max_perplexity_ratio", options.max_perplexity_ratio),
            ("max_weight_size", options.max_weight_size),
            ("prefill_precision", options.prefill_precision),
        ):
            if value is None or (name == "calibrate" and options.rounds):
                continue
            raise UsageError(f"`{name}={value}` applies to quantised weights; add `precision=int4` or int8")
        _check_quality(options)
        return
    calibrates = options.rounding in quantisers.CALIBRATING
    if calibrates and options.calibrate is None:
        raise UsageError(f"`quantiser={options.rounding}` needs a calibration text; add `calibrate`")
    if options.calibrate is not None and not calibrates:
        raise UsageError(
            f"`quantiser={options.rounding}` uses no text: omit `calibrate`, or choose "
            f"`quantiser={quantisers.CALIBRATED}`"
        )
    if options.block_size is not None and options.block_size not in BLOCK_SIZES:
        sizes = ", ".join(map(str, BLOCK_SIZES))
        raise UsageError(f"`block_size={options.block_size}`: choose one of {sizes}")
    _check_activations(options)
    _check_prefill(options)
    if not options.verify:
        raise UsageError(
            f"`precision={options.precision}` requires a quality measurement with the source model: omit `verify=False`"
        )


def _check_quality(options: ExportOptions) -> None:
    """Check the quality options for weights that are not quantised. Raises UsageError."""
    for name in ("quality_text", "quality_tokens"):
        value = getattr(options, name)
        if value is None:
            continue
        if not options.measures and options.precision != AUTO:  # for `auto` it is known with the checkpoint
            raise UsageError(
                f"`{name}={value}` measures the loss of quantisation, but `precision={options.precision}` "
                "quantises nothing: choose another precision, or omit it"
            )
        if not options.verify:
            raise UsageError(
                f"`{name}={value}`: the quality is measured against the source model, which "
                "`verify=False` does not run; omit one of them"
            )


def _check_activations(options: ExportOptions) -> None:
    """Check the activations of quantised weights. Raises UsageError."""
    said = f"`activations={options.activations}`"
    if options.activations != INTEGERS:
        return
    if options.precision != "int8":
        raise UsageError(f"{said}: products of 8-bit integers need 8-bit weights: add `precision=int8`")
    if options.block_size is not None:
        raise UsageError(f"{said}: every row of a weight has one scale: omit `block_size`")


def _check_prefill(options: ExportOptions) -> None:
    """Check the options of a separate prefill graph. Raises UsageError."""
    if options.prefill_precision is None:
        return
    said = f"`prefill_precision={options.prefill_precision}`"
    if options.prefill_precision != INTEGERS:
        raise UsageError(f"{said}: choose {INTEGERS}, the only precision of a prefill graph")
    if options.activations == INTEGERS:
        raise UsageError(f"{said}: `activations={INTEGERS}` already computes this way; omit one of them")
    if options.activations not in (None, EXACT.name):
        raise UsageError(
            f"{said}: the prefill graph computes in float32 between its products, and both graphs share a "
            f"cache: omit `activations={options.activations}`"
        )
    if options.static_shapes:
        raise UsageError(
            f"{said}: it is for processors that multiply integers fast, but `static_shapes=True` is for "
            "compilers; omit one of them"
        )


def _made_for(config: PreTrainedConfig) -> tuple[str, int | None]:
    """Name and value of the config's maximum length; None where it has none."""
    for name in CONTEXT_LENGTHS:
        found = getattr(config, name, None)
        if is_number(found) and isinstance(found, int) and found >= 1:  # some have -1 for no limit
            return getattr(type(config), "attribute_map", {}).get(name, name), found
    return "", None


def most_positions(checkpoint: Checkpoint) -> int | None:
    """The largest N of an export of the checkpoint; None without a limit."""
    config = checkpoint.config.get_text_config(decoder=True)
    _, made_for = _made_for(config)
    return None if made_for is None else int(min(made_for * _stretch(config), 1 << 62))


def max_length(options: ExportOptions, checkpoint: Checkpoint) -> int:
    """N: as requested, else the model's maximum length, at most `DEFAULT_MAX_LENGTH`."""
    name, made_for = _made_for(checkpoint.config.get_text_config(decoder=True))
    if made_for == 1:
        raise CheckpointError(
            f"{checkpoint.where}: {name} in config.json is 1, but a prompt and a new token take 2; set it "
            "to the length the model was trained for"
        )
    if options.max_length is None:
        return min(int(made_for or DEFAULT_MAX_LENGTH), DEFAULT_MAX_LENGTH)
    most = most_positions(checkpoint)
    if most is not None and options.max_length > most:
        asked = f"`max_length={options.max_length}`"
        raise UsageError(f"{asked}: the model supports at most {most} positions ({name} in config.json)")
    return options.max_length


def _stretch(config: PreTrainedConfig) -> float:
    """The factor by which dynamic rope extends the maximum length."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return max(float(part.get("factor") or 1.0) if part.get("rope_type") == "dynamic" else 1.0 for part in kinds)
