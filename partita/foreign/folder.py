"""Open a folder as a manifest, whether it is a package or foreign."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from partita.errors import UsageError
from partita.foreign.layouts import GENAI_CONFIG, SUBFOLDER, onnx_files
from partita.options.fields import group, path_of
from partita.options.groups import ForeignFolder
from partita.package.folder import MANIFEST, Manifest, check_folder, is_of_others, read_manifest, unreadable


@dataclass(frozen=True, kw_only=True)
class Choice(ForeignFolder):
    """The user's settings for a foreign folder."""

    contract: Path | None = None

    @classmethod
    def of(cls, options: ForeignFolder) -> Self:
        """The settings in a command's options."""
        return replace(group(options, cls), contract=path_of(options.contract))

    @property
    def setting_names(self) -> tuple[str, ...]:
        """Names of the settings that are set."""
        return tuple(name for name, value in asdict(self).items() if value is not None)

    def refuse_for_file(self) -> None:
        """Raise UsageError for a setting, because the model is a file."""
        for name in self.setting_names:
            raise UsageError(f"`{name}` is only for foreign folders; omit it for a file")


NO_CHOICE = Choice()


def is_foreign(folder: Path) -> bool:
    """Whether a folder has ONNX files and no manifest of a package. Raises PackageError when it is unreadable."""
    try:
        check_folder(folder)
        if not folder.is_dir() or ((folder / MANIFEST).is_file() and not is_of_others(folder / MANIFEST)):
            return False
        return (folder / GENAI_CONFIG).is_file() or bool(onnx_files(_names(folder)))
    except PermissionError as error:
        raise unreadable(folder) from error


def open_folder(folder: Path, choice: Choice = NO_CHOICE) -> Manifest:
    """The manifest of a package, or an inferred one. Raises PackageError, UsageError for other settings."""
    if not is_foreign(folder):
        if choice.setting_names and (folder / MANIFEST).is_file():
            raise UsageError(
                f"`{choice.setting_names[0]}` is only for folders that Partita did not write; {folder} is a package; "
                "omit it"
            )
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
