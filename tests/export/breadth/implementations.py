"""transformers' default attention implementation of every model type, compared with its eager attention.

A tiny random checkpoint of each type reads one prompt, longer than its windows, with both. So do variants of it with
one setting changed, as implementations may differ where the defaults of a type do not lead: each setting that is True
or False is inverted, and each of `shrinking.SETTINGS` is set where it is None, and None where it is set.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.checkpoints import save_random_model
from tests.export.breadth import recipes
from tests.export.breadth.reference import AGREES, Logits, first_line, load, relative_error
from tests.export.breadth.shrinking import SETTINGS

PROMPT = [1, *(3 + (37 * i) % 280 for i in range(39))]
"""40 tokens; the windows of the tiny checkpoints have 8."""
UNRELATED = frozenset(
    {
        "add_cross_attention",
        "attentions",
        "is_decoder",
        "is_encoder_decoder",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "tie_word_embeddings",
        "torchscript",
        "use_cache",
        "use_return_dict",
    }
)
"""Switches that no attention implementation looks at."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A model type, as its recipe has it or with one setting changed."""

    model_type: str
    setting: str
    """The changed setting, as `name=value`; empty for the recipe."""
    default: str
    """Name of the default implementation; empty when the model could not be built."""
    max_rel_error: float | None
    """Of the last logits of every position; None when it was not compared."""
    reason: str = ""
    """Why it was not compared."""

    @property
    def differs(self) -> bool:
        """The two implementations compute different numbers."""
        return self.max_rel_error is not None and not self.max_rel_error <= AGREES


def comparisons(model_type: str, *, variants: bool = True) -> Iterator[Compared]:
    """The recipe of `model_type`, then its variants that can be built. Variants that fail are left out."""
    if model_type in recipes.IMPOSSIBLE:
        yield Compared(model_type, "", "", None, recipes.IMPOSSIBLE[model_type])
        return
    try:
        settings = recipes.settings(model_type)
        yield compared(model_type, settings)
    except Exception as error:  # noqa: BLE001 - a type that cannot be compared is a result
        yield Compared(model_type, "", "", None, f"{type(error).__name__}: {first_line(error)}")
        return
    for name, value, changed in _variants(model_type, settings) if variants else ():
        try:
            yield compared(model_type, changed, f"{name}={value}")
        except Exception:  # noqa: BLE001 - most combinations of settings are not meant to work
            continue


def compared(model_type: str, settings: dict[str, Any], setting: str = "") -> Compared:
    """A checkpoint with `settings`, run with both implementations. Raises what transformers raises."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_random_model(
            folder, model_type, settings, "float32", recipes.SEEDS.get(model_type, 0), recipes.STDS.get(model_type, 0.2)
        )
        model = load(folder, None)
        default = model.config.get_text_config(decoder=True)._attn_implementation
        if default == "eager":
            return Compared(model_type, setting, default, 0.0)
        wanted = _logits(model)
        del model
        return Compared(model_type, setting, default, relative_error(_logits(load(folder, "eager")), wanted))


def _logits(model: Any) -> Logits:
    import torch

    with torch.no_grad():
        logits: Logits = model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0].float().numpy()
    return logits


def _variants(model_type: str, settings: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Name, value and all settings with one setting of the decoder changed."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, **settings)
    part = next((key for key in config.sub_configs if getattr(config, key, None) is config.get_text_config()), None)
    for name, value in config.get_text_config().to_dict().items():
        if name in UNRELATED or name.startswith("_"):
            continue
        if isinstance(value, bool):
            new: Any = not value
        elif name in SETTINGS:
            new = SETTINGS[name] if value is None else None
        else:
            continue
        changed = copy.deepcopy(settings)
        (changed if part is None else changed.setdefault(part, {}))[name] = new
        yield name, new, changed


def told(entries: list[Compared]) -> str:
    """A line about one type: its recipe, and the settings with which the implementations differ."""
    recipe, *others = entries
    if recipe.max_rel_error is None:
        return f"{recipe.model_type}: not compared ({recipe.reason[:150]})"
    differ = [f"{entry.setting or 'recipe'} {entry.max_rel_error:.1e}" for entry in entries if entry.differs]
    said = f"differs from eager: {', '.join(differ)}" if differ else "as eager"
    if recipe.default == "eager" and not differ:
        said = "is eager"
    largest = max(entry.max_rel_error or 0.0 for entry in entries if not entry.differs) if not recipe.differs else 0.0
    return f"{recipe.model_type}: default {recipe.default} {said}, {largest:.1e}, {len(others)} variants"


def totals(found: list[Compared]) -> str:
    """How many types and variants were compared, with the same numbers or with others."""
    recipes_run = [entry for entry in found if not entry.setting]
    compared = [entry for entry in recipes_run if entry.max_rel_error is not None]
    eager = sum(entry.default == "eager" for entry in compared)
    variants = [entry for entry in found if entry.setting]
    differing = sorted({entry.model_type for entry in found if entry.differs})
    return (
        f"{len(compared)} types compared, {eager} of them with eager as their default; {len(variants)} variants; "
        f"{len(recipes_run) - len(compared)} types not compared; different numbers: {', '.join(differing) or 'none'}"
    )


def write(found: list[Compared], path: Path) -> None:
    """Write as JSON."""
    path.write_text(json.dumps([asdict(entry) for entry in found], indent=1) + "\n", encoding="utf-8")
