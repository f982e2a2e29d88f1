"""A transformers model without weights, its parameters fake tensors; and refusals before the trace."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers.utils.logging
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedConfig
from transformers.initialization import no_init_weights

from partita.errors import PartitaError, ResourceError, UnsupportedModelError
from partita.export.checkpoint import auto_class
from partita.export.trace import experts
from partita.export.trace.hooks import IMPLEMENTATION, register
from partita.export.trace.replacements import recompute_above, rope_by_length, static_up_to
from partita.export.trace.state import ModelStates, probe, text_config
from partita.export.weights import to_torch


@dataclass(frozen=True, slots=True)
class FakeModel:
    """A model without weights: parameters are fake tensors, buffers are real."""

    module: torch.nn.Module
    mode: FakeTensorMode
    dtype: str
    probed: ModelStates
    vocab_size: int
    rope_by_length: bool
    """Rotary frequencies depend on the sequence length, within the cache length."""
    recompute_above: int | None
    """As in `package.Graph`."""

    @property
    def parameters(self) -> int:
        """Elements of all weights, including towers that text does not use."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def hidden_size(self) -> int:
        """Hidden size; 0 where the config has none."""
        return int(getattr(text_config(self.module), "hidden_size", 0) or 0)

    def stored_buffers(self) -> dict[str, torch.Tensor]:
        """Buffers that a checkpoint may store, with the model's own values."""
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        return {name: value for name, value in self.module.state_dict().items() if name not in parameters}


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings of torch, onnxscript and transformers that a user cannot act on."""
    names = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "transformers", "torch")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    bars = transformers.utils.logging.is_progress_bar_enabled()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def build_fake_model(
    config: PreTrainedConfig, dtype: str, batch: int, max_length: int, location: Path = Path("config.json")
) -> FakeModel:
    """Build the model without weights and probe its cache. Raises UnsupportedModelError where that fails."""
    register()
    experts.register()
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake_parameter(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> Any:
        if parameter is None or isinstance(parameter, FakeTensor):
            return parameter  # a tied parameter is registered twice and must stay one object
        with mode:
            data = torch.empty(parameter.shape, dtype=parameter.dtype)
        return torch.nn.Parameter(data, requires_grad=False)

    handle = register_module_parameter_registration_hook(fake_parameter)
    try:
        with quiet(), translate_errors(f"{location}: building the model"), _constructors_may_convert():
            module = _build(config, dtype).eval()
            experts.refuse_loops(module)
            if getattr(text_config(module), "num_hidden_layers", 1) == 0:
                raise UnsupportedModelError(
                    f"{type(module).__name__} has no layers: num_hidden_layers is 0 in config.json"
                )
            limit = static_up_to(module)
            by_length = limit is not None and limit < max_length
            rereads = recompute_above(module) if by_length else None
        with (
            quiet(),
            translate_errors("running the model once on fake tensors"),
            rope_by_length(module, None),
            experts.experts_form("standard", None),
            _tensors_restored(module),
        ):
            probed = probe(module, mode, batch, max_length)
    finally:
        handle.remove()
    vocabulary = int(text_config(module).vocab_size)
    return FakeModel(module, mode, dtype, probed, vocabulary, by_length, rereads)


@contextmanager
def _constructors_may_convert() -> Iterator[None]:
    """Let a constructor call `module.to(dtype)`, for which torch's swap of the converted tensor fails on fake ones."""
    swapping = torch.nn.Module._apply

    def convert(self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        for each in self.modules() if recurse else (self,):
            for name, value in each._parameters.items():
                if value is not None:
                    each._parameters[name] = torch.nn.Parameter(fn(value), requires_grad=False)
            for name, buffer in each._buffers.items():
                each._buffers[name] = None if buffer is None else fn(buffer)
        return self

    torch.nn.Module._apply = convert  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module._apply = swapping  # type: ignore[method-assign]


@contextmanager
def _tensors_restored(module: torch.nn.Module) -> Iterator[None]:
    """Restore buffers and tensors that the model replaces while running, in the dtype of their new value."""
    real = [
        (place, name, value)
        for each in module.modules()
        for place in (vars(each), each._buffers)
        for name, value in place.items()
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
    ]
    yield
    for place, name, value in real:
        now = place.get(name)
        if isinstance(now, FakeTensor):
            place[name] = value.to(now.dtype) if now.shape == value.shape else value


def _build(config: PreTrainedConfig, dtype: str) -> torch.nn.Module:
    """The model with our attention; with transformers' default where it chooses attention by class."""
    experts_implementation(config, experts.IMPLEMENTATION)
    try:
        return _from_config(config, dtype, IMPLEMENTATION)
    except (KeyError, ValueError) as error:
        if error.args != (IMPLEMENTATION,) and "attn_implementation" not in str(error):
            raise
        return _from_config(config, dtype, None)


def _from_config(config: PreTrainedConfig, dtype: str, attention: str | None) -> torch.nn.Module:
    arguments: dict[str, Any] = {"attn_implementation": attention, "dtype": to_torch(dtype), "trust_remote_code": False}
    model: Any
    try:
        model = auto_class(config).from_config(config, **arguments)
    except DataDependentOutputException:
        # Some initialisations inspect their random weights, which are replaced anyway.
        with no_init_weights():
            model = auto_class(config).from_config(config, **arguments)
        model.tie_weights()
    return model  # type: ignore[no-any-return]


def experts_implementation(config: PreTrainedConfig, name: str) -> None:
    """Set the implementation of mixture-of-experts layers in the config and its sub-configs."""
    for part in (config, *(getattr(config, key) for key in config.sub_configs if getattr(config, key, None))):
        part._experts_implementation = name


LACKING = {
    "DefaultCPUAllocator": "out of memory; free some, or use a smaller model",
    "can't start new thread": "no thread can be started; raise the limit of memory (ulimit -v) or processes (-u)",
}
"""Part of a RuntimeError's text for exhausted resources -> our message."""


@contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Convert errors of the model code into UnsupportedModelError, a lack of memory or threads into ResourceError."""
    try:
        yield
    except PartitaError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # raised by Rust code
            raise
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, PartitaError):
                raise cause from error
            cause = cause.__cause__ or cause.__context__
        root = error
        while type(root).__module__.startswith("torch.onnx") and isinstance(root.__cause__, Exception):
            root = root.__cause__  # the outermost error of torch's exporter has no details
        first = next((line for line in str(root).splitlines() if line.strip()), "no message")
        first = re.sub(r" object at 0x[0-9a-f]+", "", first)  # a different address every time
        if lack := next((words for part, words in LACKING.items() if part in str(root)), None):
            raise ResourceError(f"{what} failed: {lack} ({first.strip()[:300]})") from error
        raise UnsupportedModelError(f"{what} failed: {type(root).__name__}: {first.strip()[:300]}") from error
