"""`partita verify`: replay a package's known answer on a provider and say, step by step, how far it was off."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from partita.commands.chain_options import ChainOptions, Target, read_chain_options, say_chain
from partita.commands.supervise import supervised
from partita.commands.terminal import print_json, write_stdout
from partita.errors import ParityError
from partita.package import Verification, check_files, read_manifest


def run(package: Path, where: ChainOptions, *, as_json: bool) -> int:
    """Check the package's hashes, replay, print the result; ParityError when it disagrees."""
    target = read_chain_options(where)
    manifest = read_manifest(package)
    check_files(package, manifest, hashes=True)
    return supervised(lambda: check(package, target, where.threads, as_json=as_json), target)


def check(package: Path, target: Target, threads: int | None, *, as_json: bool) -> int:
    """Replay and print."""
    from partita.commands.probing import package_refused
    from partita.runtime.chain import ChainError
    from partita.runtime.pins import parse_pins
    from partita.runtime.verify import replay

    pins = parse_pins(target.pins, target.chain)
    told = partial(say_chain, target)
    try:
        result = replay(package, target.chain, threads=threads, options=target.options, pins=pins, told=told)
    except ChainError as error:
        raise package_refused(error) from error
    if as_json:
        print_json(result.model_dump(mode="json"))
    else:
        write_stdout("\n".join(describe(package, result)) + "\n")
    if result.status != "verified":
        raise ParityError(f"{package}: does not compute what its model computes on {result.provider}: {result.detail}")
    return 0


def describe(package: Path, result: Verification) -> list[str]:
    """The result for people: one line per step."""
    ties = f", {result.near_ties} near ties left out of the token comparison" if result.near_ties else ""
    rows = [
        f"  {step.step:<16} {step.output:<8} {step.max_abs_error:>12.3e} {step.max_rel_error:>12.3e}  "
        f"{'equal' if step.tokens_equal else 'DIFFERENT'}"
        for step in result.steps
    ]
    return [
        f"{package}: {result.status} on {result.provider}",
        f"  reference        {result.reference}",
        f"  tolerance        {result.tolerance:g} (largest relative error){ties}",
        f"  {'step':<16} {'output':<8} {'max abs err':>12} {'max rel err':>12}  greedy tokens",
        *rows,
    ]
