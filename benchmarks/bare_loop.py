"""The least a Python loop can do with an exported graph: buffers bound once, one run per token, argmax. Nothing else.

This is the yardstick for `partita generate`, so it shares no code with it: only the manifest tells it what to feed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from partita.package.folder import read_manifest


@dataclass(frozen=True, slots=True)
class Speed:
    """One run: seconds of prefill, median and sum of seconds per decode step."""

    prefill_seconds: float
    decode_seconds: float
    decode_steps: int
    tokens: tuple[int, ...]


class BareLoop:
    """A session over model.onnx of a gqa package with batch 1 in fp32."""

    def __init__(self, folder: Path, threads: int = 0) -> None:
        """`threads`: intra-op threads; 0: as many as there are cores."""
        graph = read_manifest(folder).graph
        self.states = graph.states
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
        self.vocab_size = graph.vocab_size
        declared = {port.name: port.type for port in self.session.get_inputs()}
        self.names = frozenset(declared)
        self.positions = np.int32 if declared.get("position_ids") == "tensor(int32)" else np.int64
        self.cache = [self._value(np.zeros(s.shape, np.float32)) for s in self.states]

    @staticmethod
    def _value(array: Any) -> Any:
        return ort.OrtValue.ortvalue_from_numpy(array)

    def _bind(self, length: int) -> tuple[Any, dict[str, Any]]:
        arrays = {
            "input_ids": np.zeros((1, length), np.int64),
            "position_ids": np.zeros((1, length), self.positions),
            "logits_indices": np.array([length - 1], np.int64),
            "seqlens_k": np.zeros(1, np.int32),
            "total_sequence_length": np.zeros((), np.int32),
            "logits": np.zeros((1, 1, self.vocab_size), np.float32),
        }
        binding = self.session.io_binding()
        self._keep = [self._value(a) for a in arrays.values()]
        for (name, _), value in zip(arrays.items(), self._keep, strict=True):
            if name != "logits" and name not in self.names:
                continue
            (binding.bind_ortvalue_output if name == "logits" else binding.bind_ortvalue_input)(name, value)
        for state, value in zip(self.states, self.cache, strict=True):
            binding.bind_ortvalue_input(state.past, value)
            binding.bind_ortvalue_output(state.present, value)
        return binding, arrays

    def run(self, prompt: list[int], new_tokens: int) -> Speed:
        """Prefill `prompt` in one run, then decode greedily."""
        length = len(prompt)
        binding, arrays = self._bind(length)
        arrays["input_ids"][0] = prompt
        arrays["position_ids"][0] = np.arange(length)
        arrays["seqlens_k"][0], arrays["total_sequence_length"][()] = length - 1, length
        began = time.perf_counter()
        self.session.run_with_iobinding(binding)
        token = int(arrays["logits"][0, 0].argmax())
        prefill = time.perf_counter() - began
        tokens = [token]
        binding, arrays = self._bind(1)
        ids, positions = arrays["input_ids"], arrays["position_ids"]
        last, total, logits = arrays["seqlens_k"], arrays["total_sequence_length"], arrays["logits"]
        began = time.perf_counter()
        for position in range(length, length + new_tokens - 1):
            ids[0, 0], positions[0, 0], last[0], total[()] = token, position, position, position + 1
            self.session.run_with_iobinding(binding)
            token = int(logits[0, 0].argmax())
            tokens.append(token)
        return Speed(prefill, time.perf_counter() - began, new_tokens - 1, tuple(tokens))
