"""A folder as a manifest, whoever wrote it: the one way by which every verb opens what it was given."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from partita.errors import UsageError
from partita.foreign.layouts import GENAI_CONFIG, SUBFOLDER, onnx_files
from partita.options.groups import ForeignFolder
from partita.package.folder import MANIFEST, Manifest, check_folder, is_of_others, read_manifest, unreadable


@dataclass(frozen=True, slots=True)
class Choice:
    """What the user says of a folder that Partita did not write."""

    variant: str | None = None
    """Which of several files of one model: q4, fp16, or the name of a file."""
    contract: Path | None = None
    """A file that says what cannot be inferred."""
    max_length: int | None = None
    """N: the most tokens of a text, which is also how long buffers of a cache of fixed length are."""

    @classmethod
    def of(cls, options: ForeignFolder) -> Self:
        """The choice of a verb's options."""
        contract = None if options.contract is None else Path(options.contract)
        return cls(options.variant, contract, options.max_length)

    @property
    def given(self) -> tuple[str, ...]:
        """Names of what was said."""
        return tuple(name for name, value in asdict(self).items() if value is not None)

    @property
    def reads(self) -> tuple[Path, ...]:
        """Files that are read because of it, beside those of the folder."""
        return () if self.contract is None else (self.contract,)


AS_IT_IS = Choice()


def is_foreign(folder: Path) -> bool:
    """Whether a folder has ONNX files and no manifest of a package. Raises PackageError when it may not be read."""
    try:
        check_folder(folder)
        if not folder.is_dir() or ((folder / MANIFEST).is_file() and not is_of_others(folder / MANIFEST)):
            return False
        return (folder / GENAI_CONFIG).is_file() or bool(onnx_files(_names(folder)))
    except PermissionError as error:
        raise unreadable(folder) from error


def open_folder(folder: Path, choice: Choice = AS_IT_IS) -> Manifest:
    """The manifest of a package, or one that is inferred for a folder of another exporter, and lies nowhere on disk.

    Raises PackageError for what is neither, or cannot be understood; UsageError for a choice that the folder does not
    have.
    """
    if not is_foreign(folder):
        if choice.given and (folder / MANIFEST).is_file():
            raise UsageError(f"`{choice.given[0]}` is for folders that Partita did not write; {folder} is a package")
        return read_manifest(folder)
    from partita.foreign.manifest import infer_manifest

    return infer_manifest(folder, _names(folder), choice.variant, choice.contract, choice.max_length)


def _names(folder: Path) -> list[str]:
    """Files of a folder and of its subfolder onnx/, relative to it."""
    return [
        path.relative_to(folder).as_posix()
        for home in (folder, folder / SUBFOLDER)
        if home.is_dir()
        for path in home.iterdir()
        if path.is_file()
    ]
