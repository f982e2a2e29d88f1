"""known_answer.safetensors: the tokens and logits of the source model that a package is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from partita.errors import PackageError
from partita.package.folder import KNOWN_ANSWER, path_inside
from partita.remedies import FROM_CHECKPOINT

SCHEMA = "partita.known_answer/1"


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """A prompt, its greedy continuation, and their logits."""

    prompt: npt.NDArray[np.int64]
    """[P]."""
    tokens: npt.NDArray[np.int64]
    """[D] greedy tokens; the first follows the prompt."""
    prefill_logits: npt.NDArray[np.float32]
    """[K, vocab]: logits of the last K prompt tokens."""
    decode_logits: npt.NDArray[np.float32]
    """[D, vocab]; row i is the logits after token i."""
    reference: str
    own_frequencies: bool = False
    """Whether the prompt's logits have rotary frequencies for P tokens, and all others for `length` tokens."""
    not_exercised: tuple[str, ...] = ()
    """Sliding windows, attention chunks and rotary frequencies beyond the length of the text."""

    @property
    def length(self) -> int:
        """Tokens of prompt and continuation."""
        return len(self.prompt) + len(self.tokens)

    @property
    def first(self) -> int:
        """The first position with logits."""
        return len(self.prompt) - len(self.prefill_logits)

    def pick(self, logits: npt.NDArray[np.float32], history: npt.NDArray[np.int64]) -> int:
        """The reference's next token, independent of the logits."""
        return int(self.tokens[min(len(history) - len(self.prompt), len(self.tokens) - 1)])


ARRAYS = ("prompt", "tokens", "prefill_logits", "decode_logits")


def save(answer: KnownAnswer, folder: Path, name: str = KNOWN_ANSWER) -> None:
    """Write known_answer.safetensors, or that of an adapter. Raises OSError."""
    from safetensors.numpy import save as serialised

    metadata = {"schema": SCHEMA, "reference": answer.reference, "not_exercised": "; ".join(answer.not_exercised)}
    if answer.own_frequencies:
        metadata["prompt_frequencies"] = "own"
    # not save_file, whose files only their owner can read, and which hides a full disk behind its own exception
    (folder / name).write_bytes(serialised({each: getattr(answer, each) for each in ARRAYS}, metadata=metadata))


def read_known_answer(folder: Path, name: str = KNOWN_ANSWER) -> KnownAnswer:
    """Read known_answer.safetensors, or that of an adapter. Raises PackageError when it is missing or damaged."""
    from safetensors import SafetensorError, safe_open

    path = path_inside(folder, name)
    if not path.is_file():
        raise PackageError(f"{folder}: the package has no {name}; export the checkpoint without `verify=False`")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            return KnownAnswer(
                **{each: file.get_tensor(each) for each in ARRAYS},
                reference=metadata.get("reference", "unknown"),
                own_frequencies=metadata.get("prompt_frequencies") == "own",
                not_exercised=tuple(filter(None, metadata.get("not_exercised", "").split("; "))),
            )
    except (SafetensorError, OSError) as error:
        raise PackageError(f"{path}: damaged ({error})", remedy=FROM_CHECKPOINT) from error
