"""Models on the Hugging Face hub: their ids, the commit behind an id, downloads, uploads, and errors in one line."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from partita.errors import CheckpointError, PartitaError, UsageError
from partita.export.progress import Progress, Silent, Stage, stage
from partita.package.folder import MANIFEST, is_of_others, is_package
from partita.remedies import Remedy

HUB_ID = re.compile(r"(?:hf:/{1,2})?(?P<name>[\w-][\w.-]*(?:/[\w-][\w.-]*)?)(?:@(?P<revision>[\w./-]+))?")
"""owner/name, name, owner/name@revision, hf://owner/name; ./name, name/ and a/b/c are paths."""
ONNX_FILE = re.compile(r"(onnx/)?[^/]+\.onnx")
CHECKPOINT_WEIGHTS = re.compile(r"[^/]+\.(safetensors|gguf)|pytorch_model[^/]*\.bin")
MODEL_SUFFIXES = (".gguf", ".onnx", ".json", ".safetensors")
"""A name with one of these is a file."""
TIMEOUT_SECONDS = 10.0
LOGIN = ("hf", "auth", "login")
PRIVATE = Remedy("check the name, or for a private model log in", LOGIN)
GATED = Remedy("accept its conditions on https://huggingface.co/{name} and log in", LOGIN)
MAY_UPLOAD = Remedy("log in with a token that may write", LOGIN)
NOT_UPLOADED = (".*",)
"""Files of a package folder that are not part of the package."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the hub at one commit."""

    name: str
    commit: str
    is_model_folder: bool
    """It runs as it is: a Partita package, or the ONNX decoder of another exporter without a checkpoint."""
    files: tuple[str, ...] = ()
    """All its files; empty if unknown."""

    @property
    def pinned(self) -> str:
        """Its id with the commit as revision."""
        return f"{self.name}@{self.commit}"


def check_model(given: str) -> None:
    """Raise CheckpointError when `given` is neither on disk nor a hub id."""
    if not os.path.lexists(given) and (given.endswith(MODEL_SUFFIXES) or not HUB_ID.fullmatch(given)):
        raise CheckpointError(f"{given}: no such file or folder, and not a hub id of the form owner/name")


def at_revision(given: str, revision: str | None) -> str:
    """The hub id `given` at this revision. Raises UsageError when it is on disk or names another revision."""
    if revision is None:
        return given
    found = HUB_ID.fullmatch(given)
    if os.path.lexists(given) or found is None:
        raise UsageError(f"`revision={revision}` is only for models of the hub, but {given} is on disk; omit it")
    if found["revision"] not in (None, revision):
        raise UsageError(f"`revision={revision}` differs from the revision in {given}; give only one")
    return f"{found['name']}@{revision}"


def find_model(given: str, known: Path) -> HubModel:
    """The commit of a hub id; offline, the last one in `known` or the cache. Raises CheckpointError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    found = HUB_ID.fullmatch(given)
    assert found is not None
    name, revision = found["name"], found["revision"]
    record = known / f"{hashlib.sha256(f'{name}@{revision}'.encode()).hexdigest()[:16]}.json"
    try:
        info = HfApi().model_info(name, revision=revision, timeout=TIMEOUT_SECONDS)
        files = tuple(each.rfilename for each in info.siblings or ())
        model = HubModel(name, str(info.sha), _is_model_folder(name, str(info.sha), files), files)
    except Exception as error:  # the hub's client and its HTTP library share no base class
        if isinstance(error, RepositoryNotFoundError | RevisionNotFoundError):
            raise hub_error(given, error) from error
        if record.is_file():
            return HubModel(**json.loads(record.read_text(encoding="utf-8")))
        with suppress(Exception):
            folder = download(name, revision, local_files_only=True)
            files = tuple(each.relative_to(folder).as_posix() for each in folder.rglob("*"))
            return HubModel(name, folder.name, is_package(folder) or _is_onnx_decoder(files))
        raise hub_error(given, error) from error
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(asdict(model)), encoding="utf-8")
    return model


def _is_model_folder(name: str, commit: str, files: Sequence[str]) -> bool:
    """Whether a repository has the manifest of a package, or the ONNX files of a decoder and no checkpoint."""
    from huggingface_hub import hf_hub_download

    if MANIFEST in files:
        manifest = hf_hub_download(name, MANIFEST, revision=commit, tqdm_class=_bar_class(Silent()))
        if not is_of_others(Path(manifest)):
            return True
    return _is_onnx_decoder(files)


def _is_onnx_decoder(files: Sequence[str]) -> bool:
    """Whether a repository has ONNX files and no weights of a checkpoint."""
    return any(map(ONNX_FILE.fullmatch, files)) and not any(map(CHECKPOINT_WEIGHTS.fullmatch, files))


def download(name: str, revision: str | None, progress: Progress | None = None, **settings: Any) -> Path:
    """The folder of a repository in the hub's cache. `settings`: of `snapshot_download`, whose errors are raised."""
    from huggingface_hub import snapshot_download

    settings["revision"] = revision
    size = None
    with suppress(Exception):  # only for the percentage; the download itself raises
        planned: Any = snapshot_download(name, dry_run=True, tqdm_class=_bar_class(Silent()), **settings)
        size = sum(each.file_size or 0 for each in planned if each.will_download)
    with stage(progress or Silent(), "download", {}, size) as current:
        return Path(snapshot_download(name, tqdm_class=_bar_class(current), **settings))


def _bar_class(current: Stage) -> Any:
    """A class of bars that draws nothing, for the hub's client: its last bar of bytes advances the stage."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    last: list[object] = []

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **{**settings, "disable": True})
            if settings.get("unit") == "B":
                last[:] = [self]

        def update(self, n: float | None = 1) -> None:
            if last and last[0] is self:
                current.advance(int(n or 0))

    return Bar


def model_folder(model: HubModel, progress: Progress | None = None, without: Sequence[str] = ()) -> Path:
    """The model folder, downloaded once. `without`: files that are not needed. Raises CheckpointError."""
    try:
        return download(model.name, model.commit, progress, ignore_patterns=[glob.escape(file) for file in without])
    except Exception as error:
        raise hub_error(model.name, error) from error


def upload(folder: Path, name: str, message: str, *, private: bool) -> str:
    """Upload a folder to a repository, which is created if it does not exist; return its address. Raises UsageError.

    The progress bars are those of huggingface_hub.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=name, folder_path=folder, commit_message=message, ignore_patterns=[*NOT_UPLOADED]
        )
    except Exception as error:
        raise hub_error(name, error, upload=True) from error
    return str(done.commit_url)


def hub_error(given: str, error: BaseException, *, upload: bool = False) -> PartitaError:
    """An error of the hub's client in one line: what the hub refused, and what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalTokenNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    status = getattr(getattr(error, "response", None), "status_code", None)
    message = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if upload:
        if isinstance(error, LocalTokenNotFoundError | RepositoryNotFoundError) or status in (401, 403):
            return UsageError(f"{given}: the hub rejected the upload ({message})", remedy=MAY_UPLOAD)
        return UsageError(
            f"{given}: the upload to the Hugging Face hub failed ({message}); check the name and the network"
        )
    if isinstance(error, GatedRepoError):
        name = given.partition("@")[0]
        return CheckpointError(f"{given}: gated on the Hugging Face hub", remedy=GATED.filled(name=name))
    if isinstance(error, RevisionNotFoundError):
        return CheckpointError(
            f"{given}: the Hugging Face hub does not have this revision of the model; check its name"
        )
    if isinstance(error, RepositoryNotFoundError) or status == 401:
        return CheckpointError(f"{given}: found neither a folder nor a model on the Hugging Face hub", remedy=PRIVATE)
    return CheckpointError(
        f"{given}: not a folder, and the download from the Hugging Face hub failed ({message}); check the "
        "name and the network, or download it on another machine and give its folder"
    )
