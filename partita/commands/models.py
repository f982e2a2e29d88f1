"""The package of a MODEL argument of the command line."""

from __future__ import annotations

import os
from pathlib import Path

from partita.commands.audience import TERMINAL
from partita.commands.generate_options import argument_text
from partita.commands.terminal import Bars
from partita.library.model_cache import folder_of
from partita.options.fields import PathText, group
from partita.options.groups import ForeignFolder, SourceOptions
from partita.providers.resolve import parse_chain


def package_of(model: PathText, options: SourceOptions) -> Path:
    """The folder that runs MODEL: itself, or the package that it is exported to for the first provider of the chain.

    `options`: those of the verb, with `providers` or `chains`. Raises what `folder_of` raises.
    """
    chain = getattr(options, "providers", None) or next(iter(getattr(options, "chains", None) or ()), None)
    by_library = getattr(options, "provider_libraries", None)
    target = parse_chain(chain)[0].name if isinstance(chain, str) and not by_library else None
    source = argument_text(os.fspath(model), "MODEL")
    foreign = group(options, ForeignFolder) if isinstance(options, ForeignFolder) else None
    with Bars() as bars:
        return folder_of(
            source,
            options.precision,
            target,
            revision=options.revision,
            foreign=foreign,
            progress=bars,
            audience=TERMINAL,
        )
