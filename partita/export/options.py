"""The options of an export, with the checks that need neither torch nor transformers, which take seconds to load."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from partita.dtypes import ACTIVATIONS, EXACT, PRECISIONS, Precision, multiplied_with
from partita.errors import CheckpointError, UsageError
from partita.export.hub import check_model
from partita.export.publish import check_target
from partita.export.quantise import CALIBRATED, DEFAULT, read_keep
from partita.export.trace.attention import GROWING, lowering
from partita.options.export import ExportOptions as Options
from partita.options.fields import check_fields, describe_fields
from partita.package.contract import CONTEXT_LENGTHS
from partita.package.folder import MANIFEST, check_folder
from partita.untrusted_files import is_number

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from partita.export.checkpoint.description import Checkpoint


DEFAULT_MAX_LENGTH = 2048
DEFAULT_PREFILL_CHUNK = 128
RECURRENT_PREFILL_CHUNK = 16
"""Smaller, because these models cannot pad a chunk: the rest of a prompt runs token by token."""
INTEGERS = "int8"
"""Activations that the graph quantises."""
CACHE_LOWERING: Final = "gqa"
"""The lowering of attention that supports an int8 or window cache."""
FIXED: Final = "fixed"
WINDOW: Final = "window"
BLOCK_SIZES = (32, 64, 128)
"""Possible numbers of weights per scale."""
ADAPTER_NAME = "[A-Za-z0-9][A-Za-z0-9_-]{0,63}"
"""It becomes part of file names."""
AUTO: Final = "auto"
OPTIMUM: Final = "optimum"
PACKED = "int4"
"""A possible value of `auto`: options of quantised weights are allowed with it."""
OLDEST_OPSET = 18
"""The minimum that torch writes."""
MAX_OPSET = 24
"""Highest operator set that the pinned torch exporter writes."""
OF_ROUNDING = ("block_size", "quantiser", "calibrate", "max_perplexity_ratio", "max_weight_size", "prefill_precision")
"""Options of quantisation."""


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
    def read_paths(self) -> tuple[str, ...]:
        """Folders that are read, as given."""
        adapters = (self.with_adapters or {}).values()
        return tuple(os.fspath(path) for path in (self.checkpoint, self.adapter, *adapters) if path is not None)

    @property
    def computing(self) -> Precision:
        """The precision of the package. Raises KeyError for an unknown name."""
        found = PRECISIONS[self.named]
        if found.bits is None and found is not EXACT and self.activations == "fp32":
            return replace(found, dtype=EXACT.dtype, cpu_dtype=None, stored=found.dtype)
        return found if found.bits is None else replace(found, dtype=ACTIVATIONS[self.activations or "fp32"])

    @property
    def quantises(self) -> bool:
        """Whether weights or the cache are quantised to integers."""
        return self.computing.bits is not None or self.cache_precision is not None

    @property
    def measures(self) -> bool:
        """Whether anything is rounded, so that the quality must be measured."""
        return self.quantises or self.computing is not EXACT

    @property
    def searches(self) -> bool:
        """Whether the bits of weights are searched."""
        return self.max_perplexity_ratio is not None or self.max_weight_size is not None

    @property
    def rounding(self) -> str:
        """The quantiser."""
        return self.quantiser or (DEFAULT if self.calibrate is None else CALIBRATED)


def _required_lowering(options: ExportOptions) -> Literal["gqa", "growing"] | None:
    """The lowering that the layout of the cache requires; None for any."""
    if options.cache == GROWING:
        return GROWING
    return CACHE_LOWERING if options.cache == WINDOW else None


def with_layout(options: ExportOptions) -> ExportOptions:
    """The options with the lowering that the cache requires."""
    only = _required_lowering(options) if options.cache_precision is None else CACHE_LOWERING
    return replace(options, attention=only or options.attention)


def _quantises(options: ExportOptions) -> bool:
    """Whether weights are quantised; False while `auto` is not settled."""
    return options.computing.bits is not None


Rule = tuple[Callable[[ExportOptions], object], str]
"""A condition under which options are refused, and the message, in which `o` is the options."""
_ACTIVATIONS = "`activations={o.activations}`"
_CACHE = "`cache_precision={o.cache_precision}`"
EXCLUDES: Mapping[str, Sequence[str]] = {
    "exporter=optimum": ("adapter", "with_adapters", "static_shapes", "cache_precision", "activations", "without_pass"),
    "cache=window": ("static_shapes", "cache_precision"),
    "cache=growing": ("static_shapes", "cache_precision", "prefill_precision"),
    "with_adapters": ("adapter", "prefill_precision"),
    "prefill_precision": ("static_shapes", "activations=int8", "activations=fp16", "activations=bf16"),
    "activations=int8": ("block_size",),
    "verify=False": ("verify_length", "cache_precision"),
}
"""An option, by name or with a value -> options that cannot be set with it."""
RULES: tuple[Rule, ...] = (
    (
        lambda o: o.exporter == OPTIMUM and o.named not in ("fp32", "fp16"),
        f"`precision={{o.precision}}`: `exporter={OPTIMUM}` supports only fp32 and fp16",
    ),
    (
        lambda o: o.exporter == OPTIMUM and (o.cache == WINDOW or o.attention not in (AUTO, GROWING)),
        f"`exporter={OPTIMUM}` writes a growing cache: omit `cache` and `attention`, or use `cache={GROWING}`",
    ),
    (
        lambda o: o.prefill_chunk is not None and not o.static_shapes,
        "`prefill_chunk` fixes the shape of prefill.onnx, so it needs `static_shapes=True`",
    ),
    (lambda o: o.cache == FIXED and o.attention == GROWING, f"`attention={GROWING}`: use `cache={GROWING}`"),
    (
        lambda o: o.attention not in (AUTO, _required_lowering(o) or o.attention),
        "`cache={o.cache}` does not support `attention={o.attention}`; omit one of them",
    ),
    (
        lambda o: o.cache_precision is not None and o.attention not in (AUTO, CACHE_LOWERING),
        f"{_CACHE}: `attention={{o.attention}}` keeps its cache in floats; use `attention={CACHE_LOWERING}`",
    ),
    (
        lambda o: o.cache_precision is not None and o.computing.cpu_dtype is not None,
        f"{_CACHE}: cannot be verified with {{o.computing.dtype}} activations; add `activations=fp32`",
    ),
    *(
        (
            # `auto` is checked again when the checkpoint settles it
            lambda o, allowed=allowed: (
                o.activations not in (None, *allowed)
                and multiplied_with(PRECISIONS[PACKED if o.precision == AUTO else o.named]) == allowed
            ),
            f"{_ACTIVATIONS}: with `precision={{o.precision}}` choose {' or '.join(allowed)}",
        )
        for allowed in dict.fromkeys(multiplied_with(each) for each in PRECISIONS.values())
    ),
    *(
        (
            lambda o, name=name: (
                not _quantises(o) and getattr(o, name) is not None and not (name == "calibrate" and o.quantises)
            ),
            f"`{name}={{o.{name}}}` applies to quantised weights; add `precision=int4` or int8",
        )
        for name in OF_ROUNDING
    ),
    *(
        rule
        for name in ("quality_text", "quality_tokens")
        for rule in (
            (
                lambda o, name=name: getattr(o, name) is not None and not o.measures and o.precision != AUTO,
                f"`{name}={{o.{name}}}` measures the loss of quantisation, but `precision={{o.precision}}` "
                "quantises nothing: choose another precision, or omit it",
            ),
            (
                lambda o, name=name: getattr(o, name) is not None and not _quantises(o) and not o.verify,
                f"`{name}={{o.{name}}}`: the quality is measured against the source model, which `verify=False` does "
                "not run; omit one of them",
            ),
        )
    ),
    (
        lambda o: _quantises(o) and o.rounding == CALIBRATED and o.calibrate is None,
        "`quantiser={o.rounding}` needs a calibration text; add `calibrate`",
    ),
    (
        lambda o: _quantises(o) and o.rounding != CALIBRATED and o.calibrate is not None,
        f"`quantiser={{o.rounding}}` uses no text: omit `calibrate`, or choose `quantiser={CALIBRATED}`",
    ),
    (
        lambda o: o.block_size not in (None, *BLOCK_SIZES),
        f"`block_size={{o.block_size}}`: choose one of {', '.join(map(str, BLOCK_SIZES))}",
    ),
    (
        lambda o: _quantises(o) and o.activations == INTEGERS and o.precision != "int8",
        f"{_ACTIVATIONS}: products of 8-bit integers need 8-bit weights: add `precision=int8`",
    ),
    (
        lambda o: _quantises(o) and not o.verify,
        "`precision={o.precision}` requires a quality measurement with the source model: omit `verify=False`",
    ),
    (
        lambda o: o.opset is not None and not OLDEST_OPSET <= o.opset <= MAX_OPSET,
        f"`opset={{o.opset}}`: must be between {OLDEST_OPSET} and {MAX_OPSET}",
    ),
)


def _is_set(options: ExportOptions, option: str) -> bool:
    """Whether an option is set, or has the value that is given with its name."""
    name, _, value = option.partition("=")
    found = getattr(options, name)
    return str(found) == value if value else bool(found)


def _spelled(options: ExportOptions, option: str) -> str:
    """An option with its value, or the name alone where the value has several parts."""
    name = option.partition("=")[0]
    found = getattr(options, name)
    return f"`{name}={found}`" if isinstance(found, str | int | Path) else f"`{name}`"


def check_options(options: ExportOptions) -> None:
    """Check the options without a checkpoint. Raises UsageError."""
    check_fields(options)
    _check_adapter_names(list(options.with_adapters or {}))
    if options.without_pass:
        from partita.export.passes import check_skipped

        check_skipped(options.without_pass)
    chosen = None if options.attention == AUTO else lowering(options.attention)
    if chosen is not None and options.opset is not None and options.opset < chosen.min_opset:
        raise UsageError(f"`opset={options.opset}`: `attention={chosen.name}` needs opset {chosen.min_opset} or newer")
    for option, others in EXCLUDES.items():
        for other in others:
            if _is_set(options, option) and _is_set(options, other):
                pair = f"{_spelled(options, option)} does not support {_spelled(options, other)}"
                raise UsageError(f"{pair}; omit one of them")
    for broken, message in RULES:
        if broken(options):
            raise UsageError(message.format(o=options))
    precision = PACKED if options.precision == AUTO else options.named
    read_keep(tuple((options.keep or {}).items()), precision, options.computing.dtype)


def _check_adapter_names(names: Sequence[str]) -> None:
    """Raise UsageError for names of adapters that cannot be parts of file names."""
    files = [name.casefold() for name in names]  # some file systems ignore case
    for name in names:
        if not re.fullmatch(ADAPTER_NAME, name):
            raise UsageError(
                f"`with_adapters`: {name[:80]!r} is not a valid adapter name: use at most 64 letters, digits, - and _"
            )
        if files.count(name.casefold()) > 1:
            raise UsageError(f"`with_adapters`: {name} is set twice; set it once (case is ignored)")


def _maximum_length(config: PreTrainedConfig) -> tuple[str, int | None]:
    """Name and value of the config's maximum length; None where it has none."""
    for name in CONTEXT_LENGTHS:
        found = getattr(config, name, None)
        if is_number(found) and isinstance(found, int) and found >= 1:  # some have -1 for no limit
            return getattr(type(config), "attribute_map", {}).get(name, name), found
    return "", None


def most_positions(checkpoint: Checkpoint) -> int | None:
    """The largest N of an export of the checkpoint; None without a limit."""
    config = checkpoint.config.get_text_config(decoder=True)
    _, made_for = _maximum_length(config)
    return None if made_for is None else int(min(made_for * _stretch(config), 1 << 62))


def max_length(options: ExportOptions, checkpoint: Checkpoint) -> int:
    """N: as requested, else the model's maximum length, at most `DEFAULT_MAX_LENGTH`."""
    name, made_for = _maximum_length(checkpoint.config.get_text_config(decoder=True))
    if made_for == 1:
        raise CheckpointError(
            f"{checkpoint.location}: {name} in config.json is 1, but a prompt and a new token take 2; set it "
            "to the length the model was trained for"
        )
    if options.max_length is None:
        return min(int(made_for or DEFAULT_MAX_LENGTH), DEFAULT_MAX_LENGTH)
    most = most_positions(checkpoint)
    if most is not None and options.max_length > most:
        requested = f"`max_length={options.max_length}`"
        raise UsageError(f"{requested}: the model supports at most {most} positions ({name} in config.json)")
    return options.max_length


def _stretch(config: PreTrainedConfig) -> float:
    """The factor by which dynamic rope extends the maximum length."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return max(float(part.get("factor") or 1.0) if part.get("rope_type") == "dynamic" else 1.0 for part in kinds)


Asked = Mapping[str, tuple[str, ...]]
"""Name of an option of `partita export` without dashes -> its values; empty for a flag."""
_OF_A_PLACE = frozenset({"checkpoint", "out", "force"})
"""Options that are not recorded."""


def asked_options(options: Options) -> dict[str, tuple[str, ...]]:
    """Every option that was set. Files and folders are recorded by name."""
    found = {}
    for each in describe_fields(Options):
        value = getattr(options, each.name)
        if each.name in _OF_A_PLACE or value == each.default or not (value or value is False):
            continue
        flag = each.flag.removeprefix("--")
        values = _values(value)
        found[f"no-{flag}" if value is False else flag] = (",".join(values),) if each.name == "keep" else values
    return found


def _values(value: Any, prefix: str = "") -> tuple[str, ...]:
    """The words of an option on the command line: NAME=VALUE of a mapping, PROVIDER.NAME=VALUE of a nested one."""
    if isinstance(value, bool):
        return ()
    if not isinstance(value, Mapping):
        return tuple(map(_value, value)) if isinstance(value, tuple) else (_value(value),)
    plain = (f"{prefix}{name}={_value(each)}" for name, each in value.items() if not isinstance(each, Mapping))
    nested = (_values(each, f"{name}.") for name, each in value.items() if isinstance(each, Mapping))
    return (*plain, *chain.from_iterable(nested))


def _value(value: Any) -> str:
    return value.name if isinstance(value, Path) else str(value)


def check(options: ExportOptions) -> None:
    """Raise UsageError, PackageError and CheckpointError for options, an output and a checkpoint that cannot work."""
    check_target(options.read_paths, options.folder, force=options.force)
    check_options(options)
    folder = Path(options.checkpoint)
    if not folder.is_dir():
        check_model(os.fspath(options.checkpoint))
        return
    with suppress(OSError):  # reported when the checkpoint is opened
        check_folder(folder, kind=CheckpointError)
    if not ((folder / "config.json").is_file() or (folder / MANIFEST).is_file() or any(folder.glob("*.gguf"))):
        raise CheckpointError(f"{folder}: not a checkpoint: config.json is missing")
