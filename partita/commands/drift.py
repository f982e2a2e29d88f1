"""`partita drift`: the first layer and node whose output on a provider differs from the reference."""

from __future__ import annotations

from pathlib import Path

from partita.commands.audience import TERMINAL, print_target_notes
from partita.commands.outputs import data_files, prepare, requested_view
from partita.errors import ParityError, ProviderError
from partita.foreign.folder import Choice
from partita.library.chain import read_by
from partita.library.drifting import measure_drift, read_sides
from partita.options.drift import DriftCommand

VIEWS = "partita.drift.document"


def run(options: DriftCommand) -> int:
    """Compare and show. Then raises ParityError on a difference, ProviderError if no node ran on the provider."""
    model = Path(options.model)
    given = [model, *Choice.of(options).input_paths, *map(Path, (options.inputs or {}).values())]
    given += data_files(model) if options.out is not None and model.is_file() else ()
    showing = prepare(requested_view(options), VIEWS, read_by(options, *given))
    target, reference, python = read_sides(options)
    print_target_notes(target)
    found = measure_drift(options, target, reference, python, audience=TERMINAL)
    showing.show(found)
    if found.is_within and found.unused_because is None:
        return 0
    from partita.drift.document import headline

    kind = ProviderError if found.is_within else ParityError
    raise kind(f"{model}: {headline(found)}")
