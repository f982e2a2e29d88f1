"""`python -m benchmarks.peers`: Partita beside its peers, as tables, as JSON, and as benchmarks/results/README.md."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import psutil

from benchmarks.peers import records
from benchmarks.peers.page import page, sections
from benchmarks.peers.plan import PEERS, PLANS, Entry, Places, chosen
from benchmarks.peers.prepare import ExportFailedError, file_bytes, parameters, prepare, remove
from benchmarks.peers.race import Race, Racer, Settings, environments_missing, say
from benchmarks.peers.records import DISTURBED_CORES, Bits, Contender, Machine, PeersResult, ShapeResult, Written
from benchmarks.peers.shapes import DEFAULT_SHAPES, SHAPES, Shape, make_checkpoint
from partita import __version__
from partita.library.engine.jobs import run_job
from partita.library.planning import MEASURE, MOST_SECONDS
from partita.providers.resolve import parse_chain
from partita.runtime.cpu.cores import cpu_name

WIDTHS: tuple[Bits, ...] = (32, 16, 8, 4)


def main() -> int:
    """Measure, print, store. Exit code 1 when the figures are disturbed, 2 for options that make no sense."""
    given = _options()
    try:
        results = [records.read(file) for file in given.read or ()] or [_measure(given)]
    except ValueError as error:
        say(f"bench-peers: {error}")
        return 2
    if not given.read:
        records.write(results[0], given.json)
        say(f"written: {given.json}")
    for result in results:
        print("\n".join(sections(result)))
    disturbed = any(result.disturbed for result in results)
    if given.docs and disturbed and not given.disturbed:
        say(f"{given.docs} is not written: the figures are disturbed; --disturbed writes them with a mark")
    elif given.docs:
        given.docs.write_text(page(results), "utf-8")
        say(f"written: {given.docs}")
    return 1 if disturbed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=list(DEFAULT_SHAPES))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument(
        "--precisions",
        nargs="+",
        default=[],
        help="forms as int4-b64, or widths as 4, for every shape; default: all of 135m, 16 and 4 of 0.5b, 4 of others",
    )
    parser.add_argument("--provider", choices=sorted(PLANS), default="cpu", help="where all of them run")
    parser.add_argument("--prompts", nargs="+", type=int, default=[16, 128, 1024], metavar="TOKENS")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--starts", type=int, help="times that each is started anew; default: as many as rounds")
    parser.add_argument("--start-prompt", type=int, default=128, help="prompt of the time to first token")
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or 1, help="default: the cores")
    parser.add_argument("--work", type=Path, default=Path("build/peers"), help="where checkpoints and files are made")
    parser.add_argument("--keep-files", action="store_true", help="do not remove the files of a width behind its race")
    parser.add_argument("--environments", type=Path, default=Path(".venvs"), help="folder of peer-genai and the others")
    parser.add_argument("--json", type=Path, default=Path("build/peers/result.json"))
    parser.add_argument("--docs", type=Path, help="write this page, too")
    parser.add_argument("--disturbed", action="store_true", help="write the page even so, with a mark")
    parser.add_argument("--wait", type=float, default=120, help="seconds to wait for the load average to fall")
    parser.add_argument("--read", nargs="+", type=Path, help="measure nothing: show, and write, what was stored here")
    return parser.parse_args()


def _asked(given: argparse.Namespace) -> tuple[list[Entry], Places]:
    """Who takes part, and where. Raises ValueError."""
    entries = chosen(given.peers, given.precisions, given.provider)
    places = Places(given.work, given.environments.absolute())
    if missing := environments_missing(entries, places):
        raise ValueError(f"not there: {', '.join(missing)}; run `make peer-envs`, or leave the peer out with --peers")
    if given.rounds < 1 or given.new_tokens < 2 or min(given.prompts) < 1:
        raise ValueError("there is at least 1 round, 1 token of prompt, and 2 new tokens")
    return entries, places


def _measure(given: argparse.Namespace) -> PeersResult:
    """All shapes. Raises ValueError."""
    entries, places = _asked(given)
    _wait_for_rest(given.threads, given.wait)
    machine = _machine(given.threads, given.provider)
    busy = machine.load_average is not None and machine.load_average > given.threads
    disturbed = [f"the load average was {machine.load_average:.1f} with {given.threads} threads"] if busy else []
    for reason in disturbed:
        say(f"disturbed: {reason}; these figures are not to be published")
    raced = [_shape(SHAPES[name], entries, places, given) for name in given.shapes]
    shapes = [shape for shape in raced if shape is not None]
    if not shapes:
        raise ValueError("no contender is left: no form of theirs is of these widths; give --precisions")
    return PeersResult(
        partita_version=__version__,
        commit=_commit(),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        command=shlex.join(["python", "-m", "benchmarks.peers", *_without_places(sys.argv[1:])]),
        machine=machine,
        rounds=given.rounds,
        start_prompt=given.start_prompt,
        disturbed=(*disturbed, *_disturbances(entry for shape in shapes for entry in shape.contenders)),
        shapes=tuple(shapes),
    )


def _machine(threads: int, provider: str) -> Machine:
    """This machine. Its rates are those that `partita plan` measures, with these threads."""
    gpu = None
    if provider == "cuda":
        import torch

        gpu = torch.cuda.get_device_name()
    return Machine(
        processor=cpu_name() or platform.machine(),
        cores=psutil.cpu_count(logical=False) or 1,
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        threads=threads,
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        rates=run_job(MEASURE, threads, chain=parse_chain("cpu"), timeout=MOST_SECONDS),
        gpu=gpu,
    )


def _without_places(words: list[str]) -> list[str]:
    """Options without those that say where files lie."""
    places = ("--work", "--environments", "--json", "--docs")
    return [
        word
        for before, word in zip(["", *words], words, strict=False)
        if word.partition("=")[0] not in places and before not in places
    ]


def _wait_for_rest(threads: int, seconds: float) -> None:
    """Let the load average of what ran before fall: making the files, say."""
    ends = time.monotonic() + seconds
    while hasattr(os, "getloadavg") and os.getloadavg()[0] > threads and time.monotonic() < ends:
        time.sleep(5)


def _shape(shape: Shape, entries: list[Entry], places: Places, given: argparse.Namespace) -> ShapeResult | None:
    """Files and a race, width by width; None where nobody takes part in any."""
    settings = _settings(shape, given)
    groups = [[entry for entry in entries if entry.bits == bits] for bits in _widths(shape, given)]
    contenders = [each for group in groups if group for each in _raced(shape, group, places, settings, given)]
    if not contenders:
        return None
    checkpoint = places.checkpoint(shape.name)
    result = ShapeResult(
        shape=shape.name,
        title=shape.title,
        parameters=parameters(checkpoint),
        checkpoint_bytes=file_bytes(checkpoint),
        contenders=tuple(contenders),
    )
    if not given.keep_files:
        shutil.rmtree(checkpoint, ignore_errors=True)
    return result


def _widths(shape: Shape, given: argparse.Namespace) -> tuple[Bits, ...]:
    """The widths of a shape, widest first: all that were asked for, or its own."""
    return WIDTHS if given.precisions else shape.widths


def _raced(
    shape: Shape, group: list[Entry], places: Places, settings: Settings, given: argparse.Namespace
) -> list[Contender]:
    """One width: its files are made, run beside each other, and removed, since a disk need not hold those of all."""
    checkpoint = make_checkpoint(places.checkpoint(shape.name), shape)
    racers = [Racer(entry, 0) for entry in group]
    written = [_prepared(racer, shape.name, places, settings) for racer in racers]
    ready = [racer for racer in racers if racer.error is None]
    if ready:
        say(f"{shape.name}, {group[0].bits} bits: {', '.join(racer.entry.name for racer in ready)}")
        Race(ready, shape.name, places, settings).run()
    for model in {places.model(shape.name, entry) for entry in group} - {checkpoint}:
        if not given.keep_files:
            remove(model)
    return [_record(*each, settings) for each in zip(racers, written, strict=True)]


def _settings(shape: Shape, given: argparse.Namespace) -> Settings:
    """What was asked for."""
    return Settings(
        prompts=tuple(sorted(set(given.prompts))),
        new_tokens=given.new_tokens,
        rounds=given.rounds,
        threads=given.threads,
        start_prompt=given.start_prompt,
        vocabulary=shape.settings["vocab_size"],
        starts=given.starts,
    )


def _prepared(racer: Racer, shape: str, places: Places, settings: Settings) -> Written | None:
    """The files of one contender; its error is noted where there are none."""
    began = time.perf_counter()
    try:
        found = prepare(racer.entry, shape, places, settings.length, settings.threads)
        racer.file_bytes = file_bytes(places.model(shape, racer.entry))
    except ExportFailedError as error:
        racer.error = f"export: {error}"
        say(f"  {racer.entry.name}: {racer.error}")
        return None
    say(f"  {shape} {racer.entry.name}: {racer.file_bytes / 1e6:.1f} MB after {time.perf_counter() - began:.0f} s")
    return found


def _record(racer: Racer, written: Written | None, settings: Settings) -> Contender:
    entry = racer.entry
    return Contender(
        name=entry.name,
        peer=entry.peer,
        form=entry.form,
        bits=entry.bits,
        error=racer.error,
        written=written,
        file_bytes=racer.file_bytes or None,
        versions=racer.opened.get("versions", {}),
        settings=racer.opened.get("settings", {}),
        starts=tuple(racer.starts),
        works=racer.works(settings),
        peak_rss_bytes=racer.peak_rss_bytes,
    )


def _disturbances(contenders: Iterable[Contender]) -> list[str]:
    """What other processes took, where that is too much."""
    taken = sorted(
        turn.others_cores
        for entry in contenders
        for work in entry.works
        for turn in work.turns
        if turn.others_cores is not None
    )
    middle = taken[len(taken) // 2] if taken else 0.0
    return [f"other processes kept {middle:.1f} cores busy in the median turn"] if middle > DISTURBED_CORES else []


def _commit() -> str | None:
    """The commit that is checked out, marked where files differ from it; None outside a repository."""
    try:
        words = ["git", "describe", "--always", "--dirty"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
