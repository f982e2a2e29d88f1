"""Find the decoder models among the files of a folder, and choose one. Pure on file names.

optimum writes model.onnx, or decoder_model.onnx for the first step and decoder_with_past_model.onnx for the others, or
both merged into decoder_model_merged.onnx. Hub repositories for transformers.js have the same files under onnx/, in
several precisions: model_q4.onnx, model_fp16.onnx, ... onnxruntime-genai names its file in genai_config.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from partita.errors import PackageError, UsageError
from partita.observations.text_format import listing
from partita.remedies import DECODERS_ONLY, Remedy

Phase = Literal["any", "prefill", "decode"]
SUBFOLDER = "onnx"
GENAI_CONFIG = "genai_config.json"
SUFFIX = ".onnx"
PLAIN = "model"
"""The user's name for the variant of a file without a suffix."""
MERGED, FIRST, LATER = "decoder_model_merged", "decoder_model", "decoder_with_past_model"
DECODER = re.compile(rf"({PLAIN}|{MERGED}|{LATER}|{FIRST})(?:_(.*))?")
"""File names of a decoder without their ending, and their variant."""
OTHER_MODELS = re.compile(
    r"(^|_)(encoder|vision|visual|image|audio|speech|text_encoder|text_model|embed_tokens|embeddings?|unet|vae"
    r"|prepare_inputs_embeds|projector|vocoder)(_|$)"
)
"""Name parts of files that are a part of a multimodal model, or not a decoder."""
CHOOSE = Remedy("choose one of them", options=("--variant", "{variant}"))


@dataclass(frozen=True, slots=True)
class Candidate:
    """One model in a folder: a file, or one for the first step and one for the others."""

    variant: str
    """q4, fp16, ...; empty for the plain one."""
    files: tuple[tuple[str, Phase], ...]
    """Relative to the folder."""

    @property
    def name(self) -> str:
        """The user's name for it."""
        return self.variant or PLAIN


def onnx_files(names: Iterable[str]) -> tuple[str, ...]:
    """The ONNX files among the names, in the folder and its subfolder onnx/."""
    return tuple(sorted(n for n in names if n.endswith(SUFFIX) and str(PurePosixPath(n).parent) in (".", SUBFOLDER)))


def refuse_other_models(folder: object, names: Sequence[str]) -> None:
    """Raise PackageError for encoder-decoders and models of images or sound, by file names."""
    stems = {PurePosixPath(name).stem: name for name in names}
    odd = [name for stem, name in stems.items() if OTHER_MODELS.search(stem)]
    if odd:
        raise PackageError(
            f"{folder}: {listing(odd[:5])}: component of an encoder-decoder or multimodal model, which "
            "Partita does not support",
            remedy=DECODERS_ONLY,
        )


def candidates(names: Sequence[str]) -> tuple[Candidate, ...]:
    """Every decoder model among the ONNX files `names`, the plain one first; single files are preferred."""
    stems = {name: PurePosixPath(name).stem for name in names}
    split = {name: _split(stem) for name, stem in stems.items()}
    known = {name: pair for name, pair in split.items() if pair is not None}
    if not known:  # unknown names: each file is a candidate
        single = len(names) == 1
        return tuple(Candidate("" if single else stems[name], ((name, "any"),)) for name in names)
    found = []
    for home, variant in sorted({(str(PurePosixPath(n).parent), pair[1]) for n, pair in known.items()}):
        of = {pair[0]: n for n, pair in known.items() if (str(PurePosixPath(n).parent), pair[1]) == (home, variant)}
        found.append(Candidate(variant, _files(of)))
    return tuple(sorted(found, key=lambda each: (bool(each.variant), each.variant)))


def _files(of: dict[str, str]) -> tuple[tuple[str, Phase], ...]:
    """The files of one variant to run. `of`: stem -> file."""
    if whole := of.get(PLAIN) or of.get(MERGED):
        return ((whole, "any"),)
    if FIRST in of and LATER in of:
        return ((of[FIRST], "prefill"), (of[LATER], "decode"))
    return ((of.get(LATER) or of[FIRST], "any"),)


def _split(stem: str) -> tuple[str, str] | None:
    """Stem and variant of a file's name: model_q4f16 -> model, q4f16; None for other names."""
    found = DECODER.fullmatch(stem)
    return None if found is None else (found[1], found[2] or "")


def choose(folder: object, found: Sequence[Candidate], variant: str | None) -> Candidate:
    """The candidate `variant` names, else the plain or only one. Raises UsageError, PackageError for several."""

    def names_of(file: str) -> tuple[str, str]:
        return PurePosixPath(file).name, PurePosixPath(file).stem

    if variant is not None:
        named = (
            [each for each in found if any(variant == file for file, _ in each.files)]  # a whole path is unique
            or [each for each in found if variant in (each.name, each.variant)]
            or [each for each in found if any(variant in names_of(file) for file, _ in each.files)]
        )
        if not named:
            raise UsageError(f"`variant={variant}`: no such variant; {folder} has {listing(_names_with_files(found))}")
    else:
        plain = [each for each in found if not each.variant]
        named = plain or list(found)
    if len(named) > 1:
        first = named[0].name if len({each.name for each in named}) > 1 else named[0].files[0][0]
        raise PackageError(
            f"{folder}: {len(named)} models match: {listing(_names_with_files(named))}",
            remedy=CHOOSE.filled(variant=first),
        )
    return named[0]


def files_of_other_variants(folder: object, names: Sequence[str], variant: str | None) -> list[str]:
    """The files that the chosen variant does not need, with their data, whose names begin with theirs."""
    models = onnx_files(names)
    if GENAI_CONFIG in names or not models:
        return []
    refuse_other_models(folder, models)
    chosen = {_group(file) for file, _ in choose(folder, candidates(models), variant).files}
    others = tuple(file for file in models if _group(file) not in chosen)
    return [name for name in names if name.startswith(others)]


def _group(name: str) -> tuple[str, str]:
    """Folder and variant of an ONNX file; the file itself in place of an unknown variant."""
    path = PurePosixPath(name)
    pair = _split(path.stem)
    return str(path.parent), name if pair is None else pair[1]


def _names_with_files(found: Sequence[Candidate]) -> list[str]:
    """Candidates with their files: `q4 (onnx/model_q4.onnx)`."""
    return [f"{each.name} ({' and '.join(file for file, _ in each.files)})" for each in found]
