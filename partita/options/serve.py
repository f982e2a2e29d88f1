"""Options of `serve`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from partita.options.fields import MAX_COUNT, MODEL, WEEK_SECONDS, Option, PathText, Range, option
from partita.options.generation import SpeculationOptions
from partita.options.groups import (
    Adapter,
    ForeignFolder,
    Json,
    PlacementLimits,
    PrefillChunk,
    ProbeSeconds,
    ProgressOptions,
    ProviderChain,
    SourceOptions,
)


@dataclass(frozen=True, kw_only=True)
class ServeCommand(ProgressOptions, ForeignFolder, SpeculationOptions, PlacementLimits, ProviderChain, SourceOptions):
    """Serve models over HTTP with OpenAI's API; requests join a running batch. Exit code 3 when the chain is not
    honoured.
    """

    HELP_GROUP = "Server"
    packages: Annotated[
        Sequence[PathText],
        Option(
            "Packages, folders of another exporter, checkpoints, GGUF files or hub ids; each becomes a "
            "model of the API. A checkpoint is exported once into the cache folder.",
            metavar="MODEL",
            positional=True,
            text=MODEL,
        ),
    ]
    name: Sequence[str] = option(
        "Name of a model in the API, once for each. Default: the last part of MODEL.", default=(), metavar="NAME"
    )
    host: str = option("Address to listen on; the default accepts only clients on this machine.", default="127.0.0.1")
    port: int = option(
        "Port to listen on; 0 for any free port.",
        default=8000,
        range=Range(0, 65535, "between 1 and 65535, or 0 for any free port"),
    )
    api_key: Sequence[str] = option(
        "API key that clients must send; can be repeated. Default: PARTITA_API_KEY.", default=(), metavar="KEY"
    )
    allowed_origin: Sequence[str] = option(
        "Origin of web pages that may send requests, or * for all; can be repeated.", default=(), metavar="ORIGIN"
    )
    source: str | None = option(
        "Defaults of requests from the checkpoint's generation_config.json. Default: as in OpenAI's API, "
        "temperature 1.",
        flags=("--sampling",),
        choices=("checkpoint",),
        argument="sampling",
        group="Sampling",
    )
    adapter: Adapter = None
    prefix: Sequence[PathText] = option(
        "Prefix file of `generate --save-prefix`, for prompts that begin with it; once per model.",
        default=(),
        metavar="FILE",
        group="Input",
    )
    prefill_chunk: PrefillChunk = None
    max_queue: int = option("Maximum number of waiting prompts per model.", default=256, range=Range(0, MAX_COUNT))
    max_body: int = option(
        "Largest request body. Default: 4MiB.", default=4 << 20, metavar="SIZE", text="size", range=Range(1, 1 << 40)
    )
    timeout: float = option(
        "Time limit of a request, including waiting.",
        default=600.0,
        metavar="SECONDS",
        range=Range(0.001, WEEK_SECONDS),
    )
    max_requests: int = option("Maximum number of requests in progress.", default=1024, range=Range(1, MAX_COUNT))
    drain_timeout: float | None = option(
        "Grace period for running requests after SIGTERM. Default: the request timeout.",
        metavar="SECONDS",
        range=Range(0, WEEK_SECONDS),
    )
    probe_seconds: ProbeSeconds = 0.0
    as_json: Json = False
