"""Inputs and outputs of modules of the source model on a text, for locating a layer whose results differ."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from partita.export.checkpoint.description import Checkpoint
from partita.export.trace.fake_model import quiet, translate_errors
from partita.export.verify.known_answer import check_memory, load
from partita.export.weights import memory_map

VERSIONS = f"transformers {transformers.__version__}, torch {torch.__version__}, float32"


class SourceOutputs:
    """The source model, loaded once; each call runs it on the text and reads the requested modules."""

    def __init__(self, checkpoint: Checkpoint, tokens: Sequence[int], scratch: Path) -> None:
        """Load the model. Raises ResourceError when it does not fit, UnsupportedModelError when it cannot be loaded."""
        parameters = memory_map.resident_parameters(checkpoint.tensors, scratch)
        check_memory(parameters, 0, use="for the comparison", needed=True)
        self.model = load(checkpoint, scratch)
        self.modules = dict(self.model.named_modules())
        self.tokens = torch.tensor([list(tokens)])

    def __call__(self, wanted: Collection[tuple[str, str, int, int]]) -> dict[Any, npt.NDArray[np.float32]]:
        """Values [T, ...] by module path, `input` or `output`, index, and number of tensors (0: any)."""
        found: dict[tuple[str, str, int, int], npt.NDArray[np.float32] | None] = {}

        def keep(name: str, kind: str, values: Any) -> None:
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            for key in wanted:
                _, _, index, count = key
                if key[:2] != (name, kind) or index >= len(tensors) or count not in (0, len(tensors)):
                    continue
                array = tensors[index].detach().float().numpy().copy()
                array = array[0] if array.shape[:1] == (1,) else array
                usable = key not in found and array.shape[:1] == (self.tokens.shape[1],)
                found[key] = array if usable and tensors[index].is_floating_point() else None

        def before(name: str, _: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            keep(name, "input", (*args, *named.values()))

        def after(name: str, _: Any, args: Any, result: Any) -> None:
            keep(name, "output", result if isinstance(result, tuple) else (result,))

        hooks = []
        for name, kind in {key[:2] for key in wanted}:
            module = self.modules.get(name)
            if module is not None and kind == "input":
                hooks.append(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
            elif module is not None:
                hooks.append(module.register_forward_hook(partial(after, name)))
        try:
            with quiet(), torch.no_grad(), translate_errors("running the source model"):
                self.model(input_ids=self.tokens, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return {key: array for key, array in found.items() if array is not None}
