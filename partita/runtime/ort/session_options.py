"""Options of ONNX Runtime sessions: providers, log level, configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnxruntime as ort

from partita import process
from partita.observations.names import CPU
from partita.providers.resolve import Resolution
from partita.runtime.ort.native_log import FATAL, INFO, WARNING

STRICT_KEY = "session.disable_cpu_ep_fallback"
GRAPH_FILE, WEIGHTS_FILE = "optimised.onnx", "weights.data"
"""The optimised graph of a session, and its weights, which are discarded."""
SMALL_BYTES = 1024
"""Maximum bytes of constants kept inside the file of an optimised graph."""


@dataclass(frozen=True, slots=True)
class Opening:
    """Options of opening a session, besides the providers."""

    threads: int | None = None
    """Intra-op threads; None: ONNX Runtime's default."""
    observe: bool = False
    """Profile the first runs and keep the log at INFO."""
    severity: int | None = None
    """Minimum severity to log; None: INFO with `observe`, else WARNING."""
    optimise: bool = True
    """Let ONNX Runtime fold and fuse nodes; disabled in experiments on one node."""
    strict: bool = False
    """Raise if a node would run on the CPU provider."""
    model: bytes | None = None
    """The model to open instead of the file; its external data is that of the file."""
    weights: Path | None = None
    """Folder of the external data of `model`; None: the folder of the file."""
    config: Mapping[str, str] = field(default_factory=dict)
    """Further entries of the session configuration."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for kernel creation; set only in Partita's own processes."""
    scratch: Path | None = None
    """An existing folder for the plan, for many short sessions; None: a temporary folder each."""
    saves_graph: bool | None = None
    """Save the optimised graph without its weights; None: with `observe`, unless a provider compiles subgraphs."""


def log_level(opening: Opening) -> int:
    """Minimum severity to log; nothing if the log would go to the stderr of a user's program."""
    if not process.own_process:
        return FATAL
    if opening.severity is not None:
        return opening.severity
    return INFO if opening.observe else WARNING


def chosen_providers(options: Any, active: Sequence[Resolution]) -> list[Any] | None:
    """Providers and their options as ONNX Runtime expects them. With a plugin, all are added to `options`."""
    plugins = any(resolution.library is not None for resolution in active)
    listed: list[Any] = []
    for resolution in active:
        provider, given = resolution.provider, resolution.provider_options
        config = dict(resolution.session_config)
        if resolution.library is not None:
            devices = [device for device in ort.get_ep_devices() if device.ep_name == provider.ort_name]
            options.add_provider_for_devices(devices, given)
        else:
            if provider.option_prefix:
                config |= {f"{provider.option_prefix}{name}": value for name, value in given.items()}
            if plugins and provider.ort_name != CPU:
                options.add_provider(provider.ort_name, given)
            listed.append(provider.ort_name if provider.option_prefix else (provider.ort_name, given))
        for key, value in config.items():
            options.add_session_config_entry(key, value)
    return None if plugins else listed


def session_options(plan: Path, active: Sequence[Resolution], opening: Opening, weights: Path) -> Any:
    """Options of one session. `weights`: the folder of the model's external data."""
    options = ort.SessionOptions()
    options.log_severity_level = log_level(opening)
    options.intra_op_num_threads = opening.threads or 0
    if not opening.optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    config = {
        "session.node_partition_config_file": str(plan),
        "session.record_ep_graph_assignment_info": "1",
        **opening.config,
    }
    if opening.strict:
        config[STRICT_KEY] = "1"
    if opening.model is not None:
        config["session.model_external_initializers_file_folder_path"] = str(weights)
    if opening.saves_graph:
        options.optimized_model_filepath = str(plan.with_name(GRAPH_FILE))
        with suppress(OSError):  # Windows has no such link; there the weights are in the temporary folder for a while
            plan.with_name(WEIGHTS_FILE).symlink_to(os.devnull)
        config["session.optimized_model_external_initializers_file_name"] = WEIGHTS_FILE
        config["session.optimized_model_external_initializers_min_size_in_bytes"] = str(SMALL_BYTES)
    for key, value in config.items():
        options.add_session_config_entry(key, value)
    if opening.observe:
        options.enable_profiling = True
        options.profile_file_prefix = str(plan.parent / "profile")
    return options
