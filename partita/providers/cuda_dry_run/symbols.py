"""Which functions of the CUDA libraries the stubs have, and which the installed CUDA provider wants.

The table has three parts: functions that are implemented (they begin with `API` in the C files of `standins/`),
functions that may do nothing (`LIBRARIES`, each group with its reason), and everything else, which is an error: a
function that nobody looked at must not answer 0. The wanted symbols are read from the ELF tables of the provider
library, with pyelftools. Knows nothing of compilers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from partita.errors import ProviderError
from partita.extras import explain

CUDA_MAJOR = 13
"""The CUDA version whose struct layouts and signatures the C files have. They are stable within a major version."""
COMMON = "common.h"
DEFINITION = re.compile(r"^API\b[^(]*?\b(\w+)\(", re.MULTILINE)
OF_CUDA = re.compile(r"^lib(?:cu|nv)\w*\.so")
"""Names of libraries that come from NVIDIA; the others are the system's."""
NAME_OF_CUDA = re.compile(r"^_*(?:cu|nv|nccl)[A-Za-z]\w*$")
"""Names of functions that come from NVIDIA, for the libraries whose symbols have no version."""

NO_RESULT = "it gives nothing back, and what it changes lies on the device or in a handle that nobody reads"
NO_ARITHMETIC = "its result is device memory, which is never written"
RELEASES = "handles own nothing"
ORDER = "work is done when it is queued, so there is nothing to wait for"


@dataclass(frozen=True, slots=True)
class Library:
    """One CUDA library to stand in for."""

    soname: str
    source: str | None
    """C file with its implemented functions; None when it has none."""
    harmless: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Functions that may return 0 and do nothing: groups of a reason and names."""
    lazy: bool = False
    """The provider opens it and looks its functions up by name, so its ELF tables do not tell which it wants."""

    @property
    def stem(self) -> str:
        """Name without the version, e.g. libcudart."""
        return self.soname.partition(".so")[0]

    def code(self) -> str:
        """C text of the implemented functions."""
        return c_text(self.source) if self.source else ""

    def harmless_names(self) -> tuple[str, ...]:
        """Every function that may do nothing."""
        return tuple(name for _, names in self.harmless for name in names)

    def names(self) -> frozenset[str]:
        """Every function this stub has."""
        return frozenset(DEFINITION.findall(self.code())) | frozenset(self.harmless_names())


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one build of the CUDA provider asks of the CUDA libraries."""

    sonames: tuple[str, ...]
    """CUDA libraries it cannot be loaded without."""
    symbols: tuple[tuple[str, str | None, str | None], ...]
    """Name, version and library of each undefined symbol; the last two are None for a symbol without version."""


def _words(text: str) -> tuple[str, ...]:
    """Names in `text`, one or more a line."""
    return tuple(text.split())


LIBRARIES: tuple[Library, ...] = (
    Library(
        "libcudart.so.13",
        "cudart.c",
        (
            (
                "kernels are known to the device only, and none is ever launched",
                _words(
                    "__cudaRegisterFatBinaryEnd __cudaRegisterFunction __cudaRegisterVar __cudaUnregisterFatBinary "
                    "__cudaPushCallConfiguration __cudaLaunchKernel cudaLaunchKernel cudaLaunchKernelExC "
                    "cudaLaunchCooperativeKernel cudaFuncSetAttribute cudaKernelSetAttributeForDevice cudaLibraryUnload"
                ),
            ),
            (
                ORDER,
                _words("cudaEventRecord cudaEventRecordWithFlags cudaEventSynchronize cudaStreamWaitEvent"),
            ),
            (RELEASES, _words("cudaEventDestroy cudaGraphDestroy cudaGraphExecDestroy cudaMemPoolDestroy")),
            (NO_ARITHMETIC, _words("cudaGraphLaunch")),
            ("a pool keeps no memory back", _words("cudaMemPoolSetAttribute cudaMemPoolTrimTo")),
        ),
    ),
    Library(
        "libcublas.so.13",
        "cublas.c",
        (
            (RELEASES, _words("cublasDestroy_v2")),
            (NO_RESULT, _words("cublasSetMathMode cublasSetStream_v2")),
            (
                NO_ARITHMETIC,
                _words(
                    "cublasDgeam cublasSgeam cublasDgemm_v2 cublasSgemm_v2 cublasDgemmBatched cublasSgemmBatched "
                    "cublasDgemmStridedBatched cublasSgemmStridedBatched cublasGemmEx cublasGemmBatchedEx "
                    "cublasGemmStridedBatchedEx cublasDgetrfBatched cublasSgetrfBatched cublasDgetriBatched "
                    "cublasSgetriBatched cublasScopy_v2 cublasSscal_v2"
                ),
            ),
        ),
    ),
    Library(
        "libcublasLt.so.13",
        "cublaslt.c",
        (
            (
                RELEASES,
                _words(
                    "cublasLtDestroy cublasLtMatmulDescDestroy cublasLtMatrixLayoutDestroy "
                    "cublasLtMatmulPreferenceDestroy cublasLtMatrixTransformDescDestroy"
                ),
            ),
            (
                NO_RESULT,
                _words(
                    "cublasLtMatmulDescSetAttribute cublasLtMatrixLayoutSetAttribute "
                    "cublasLtMatmulPreferenceSetAttribute cublasLtMatmulAlgoConfigSetAttribute cublasLtMatmulAlgoInit"
                ),
            ),
            (NO_ARITHMETIC, _words("cublasLtMatmul cublasLtMatrixTransform")),
        ),
    ),
    Library("libcurand.so.10", None),
    Library("libcuda.so.1", None, ((NO_RESULT, _words("cuTensorMapEncodeTiled")),)),
    Library(
        "libcufft.so.12",
        "cufft.c",
        (
            (RELEASES, _words("cufftDestroy")),
            (NO_RESULT, _words("cufftSetStream")),
            (NO_ARITHMETIC, _words("cufftXtExec")),
        ),
        lazy=True,
    ),
    Library(
        "libcudnn.so.9",
        "cudnn.c",
        (
            (
                RELEASES,
                _words(
                    "cudnnDestroy cudnnBackendDestroyDescriptor cudnnDestroyActivationDescriptor "
                    "cudnnDestroyConvolutionDescriptor cudnnDestroyDropoutDescriptor cudnnDestroyFilterDescriptor "
                    "cudnnDestroyLRNDescriptor cudnnDestroyPoolingDescriptor cudnnDestroyReduceTensorDescriptor "
                    "cudnnDestroyRNNDataDescriptor cudnnDestroyRNNDescriptor cudnnDestroyTensorDescriptor"
                ),
            ),
            (
                NO_RESULT,
                _words(
                    "cudnnBackendFinalize cudnnBackendSetAttribute cudnnDeriveBNTensorDescriptor "
                    "cudnnSetActivationDescriptor cudnnSetConvolutionGroupCount cudnnSetConvolutionMathType "
                    "cudnnSetConvolutionNdDescriptor cudnnSetDropoutDescriptor cudnnSetFilterNdDescriptor "
                    "cudnnSetLRNDescriptor cudnnSetPoolingNdDescriptor cudnnSetReduceTensorDescriptor "
                    "cudnnSetRNNDataDescriptor cudnnSetRNNDescriptor_v8 cudnnSetStream cudnnSetTensorNdDescriptor"
                ),
            ),
            (
                NO_ARITHMETIC,
                _words(
                    "cudnnActivationForward cudnnAddTensor cudnnBackendExecute cudnnBatchNormalizationForwardInference "
                    "cudnnBatchNormalizationForwardTraining cudnnConvolutionBiasActivationForward "
                    "cudnnConvolutionForward cudnnLRNCrossChannelForward cudnnPoolingForward cudnnReduceTensor "
                    "cudnnRNNForward cudnnSoftmaxForward"
                ),
            ),
        ),
        lazy=True,
    ),
)


def c_text(name: str) -> str:
    """Text of a file of `standins/`."""
    return (resources.files(__package__) / "standins" / name).read_text(encoding="utf-8")


def read_wanted(library: Path) -> Wanted:
    """What the shared library `library` asks of the CUDA libraries.

    Raises InstallationError when pyelftools is missing, ProviderError when the file is not an x86-64 shared library
    with a symbol table.
    """
    try:
        from elftools.common.exceptions import ELFError
        from elftools.elf.elffile import ELFFile
    except ImportError as error:
        raise explain(error) or error from error
    try:
        with library.open("rb") as stream:
            file = ELFFile(stream)
            if file["e_machine"] != "EM_X86_64":
                raise ProviderError(f"{library}: built for {file['e_machine']}; the dry run covers x86-64 only")
            needed = tuple(
                tag.needed
                for tag in section(file, library, ".dynamic").iter_tags("DT_NEEDED")
                if OF_CUDA.match(tag.needed)
            )
            return Wanted(needed, tuple(_undefined_symbols(file, library)))
    except ELFError as error:
        raise ProviderError(f"{library}: not a shared library ({error}); reinstall onnxruntime-gpu") from error


def _undefined_symbols(file: Any, library: Path) -> Iterator[tuple[str, str | None, str | None]]:
    """Name, version and library of every undefined symbol of CUDA."""
    by_index = {
        version["vna_other"]: (version.name, origin.name)
        for origin, versions in section(file, library, ".gnu.version_r").iter_versions()
        for version in versions
    }
    numbers = section(file, library, ".gnu.version")
    for index, symbol in enumerate(section(file, library, ".dynsym").iter_symbols()):
        if symbol["st_shndx"] != "SHN_UNDEF" or not symbol.name:
            continue
        version, origin = by_index.get(numbers.get_symbol(index)["ndx"], (None, None))
        if OF_CUDA.match(origin) if origin else NAME_OF_CUDA.match(symbol.name):
            yield symbol.name, version, origin


def section(file: Any, library: Path, name: str) -> Any:
    """One section of an ELF file. Raises ProviderError when it is missing."""
    found = file.get_section_by_name(name)
    if found is None:
        raise ProviderError(f"{library}: it has no section {name}; the dry run cannot tell what it needs")
    return found


def exports(wanted: Wanted, build: str) -> dict[str, dict[str, str | None]]:
    """Symbols that each stub must export, by soname: name -> version, None for no version.

    `build` names the provider library in messages. Raises ProviderError when the provider was built for another CUDA,
    or wants a library or a function that the table does not have.
    """
    by_soname = {library.soname: library for library in LIBRARIES}
    strangers = [soname for soname in wanted.sonames if soname not in by_soname]
    if strangers:
        raise ProviderError(_unknown_libraries(strangers, build))
    result: dict[str, dict[str, str | None]] = {
        library.soname: dict.fromkeys(sorted(library.names())) if library.lazy else {} for library in LIBRARIES
    }
    unknown = []
    for name, version, origin in wanted.symbols:
        soname = origin or next((library.soname for library in LIBRARIES if name in library.names()), None)
        library = by_soname.get(soname or "")
        if library is None or name not in library.names():
            unknown.append(name)
        else:
            result[library.soname][name] = version
    if unknown:
        raise ProviderError(
            f"{build} wants functions that the dry run does not know: {', '.join(sorted(unknown))}; "
            "use an ONNX Runtime that this Partita was tested with, or a newer Partita"
        )
    return result


def _unknown_libraries(sonames: list[str], build: str) -> str:
    """One line on CUDA libraries that have no stub."""
    stems = {library.stem for library in LIBRARIES}
    if any(soname.partition(".so")[0] in stems for soname in sonames):
        return (
            f"{build} is built for another CUDA ({', '.join(sonames)}); the dry run covers CUDA {CUDA_MAJOR}: "
            f"install an onnxruntime-gpu for CUDA {CUDA_MAJOR}"
        )
    return f"{build} needs {', '.join(sonames)}, for which the dry run has no stub; a newer Partita may have one"
