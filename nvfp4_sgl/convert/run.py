"""A conversion from beginning to end."""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from nvfp4_sgl import __version__
from nvfp4_sgl.checkpoint import checksums, modelopt_words
from nvfp4_sgl.checkpoint.beside import check_beside
from nvfp4_sgl.checkpoint.classes import MatrixClass
from nvfp4_sgl.checkpoint.inventory import INDEX, Inventory
from nvfp4_sgl.checkpoint.quantization import MANIFEST, check_manifest, check_quantization_config
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.checkpoint.verified import Verified, verify
from nvfp4_sgl.convert.folder import MANIFEST_FIELD, Folder, describe, is_finished, require_apart
from nvfp4_sgl.convert.options import Options
from nvfp4_sgl.convert.plan import Conversion, Shard, make_plan
from nvfp4_sgl.convert.progress import Progress
from nvfp4_sgl.convert.shard import ShardWriter, Stopped, is_whole
from nvfp4_sgl.convert.tally import Tally
from nvfp4_sgl.convert.words import described
from nvfp4_sgl.errors import CheckpointError, ConfigError, UnsupportedError
from nvfp4_sgl.files import UNFINISHED, require_directory, shown
from nvfp4_sgl.synthetic.tiny_folder import MARKER

NOT_COPIED = {"config.json", INDEX, MANIFEST, checksums.FILE, MARKER}
"""Small files that are written anew, or that say of a directory what does not hold for its copy."""
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack", ".h5", ".onnx"}
"""Files of weights in other formats are left behind."""
MAX_SMALL_FILE = 256 << 20
ROOM = 64 << 20
"""Bytes kept free beyond what is written."""
MAX_DEFAULT_JOBS = 8
"""Files written at once unless told; each takes about 0.3 GB of memory."""


def convert(
    source: Path,
    target: Path,
    options: Options,
    *,
    device: torch.device | str | None = None,
    jobs: int | None = None,
    dry_run: bool = False,
) -> Tally | None:
    """Write ``source`` to ``target`` in NVFP4, or resume; prints what it does.

    Args:
        device: of the arithmetic; a GPU if there is one unless given. A test demands the same bytes on all; on an
            H200 two tiny checkpoints have passed it.
        jobs: files written at once.
        dry_run: print what would be done, and do nothing.

    Returns:
        What happened to the matrices; ``None`` if nothing was done, or if only damaged files were written again.

    Raises:
        ConfigError, CheckpointError: the source cannot be read, or the target not be written.
        UnsupportedError: there is no such device.
    """
    place = _device(device)
    require_directory(source, ConfigError)
    require_apart(source, target)
    verified = verify(source)
    check_beside(source, verified.config.vocab_size)
    plan = make_plan(verified, options)
    jobs = jobs or min(os.cpu_count() or 1, MAX_DEFAULT_JOBS)
    job = describe(source, options.as_json(), __version__)
    finished = is_finished(target, job)  # before a word is said: with other options nothing of that would happen
    if finished:
        check_beside(target, verified.config.vocab_size)
    print(_announcement(verified, plan, options))
    if dry_run:
        if finished:
            print(f"{target}: converted already, from this source and with these options; every file would be checked")
        return None
    if finished and not (damaged := _damaged(target, plan.shards, checksums.read(target), jobs)):
        # A process that was killed at the very end leaves its notes behind.
        shutil.rmtree(target / UNFINISHED, ignore_errors=True)
        print(f"{target}: converted already, from this source and with these options; every file is whole")
        return None
    folder = Folder.begin(target, job, finished=finished)
    try:
        if finished:
            _mend(verified, damaged, options, folder, device=place, jobs=jobs)
            return None
        tally = _write(verified, plan, options, folder, device=place, jobs=jobs)
        _publish(source, verified, plan, folder, tally)
        folder.finish()
    finally:
        folder.close()
    print(_result(target, plan, tally))
    return tally


def _device(asked_for: torch.device | str | None) -> torch.device:
    if asked_for is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked_for)
    except RuntimeError:
        raise UnsupportedError(f"--device {asked_for}: expected cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"--device {device}: expected cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UnsupportedError(f"--device {device}: no such GPU here; leave the flag out, or pass --device cpu")
    return device


def _damaged(directory: Path, shards: Sequence[Shard], sums: Mapping[str, object], jobs: int) -> list[Shard]:
    """The ``shards`` that differ from what was written, by the checksums of their tensors."""
    if shards:
        print(f"reading {len(shards)} files that are there, to hold them against their checksums", flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        whole = list(pool.map(lambda shard: is_whole(directory, shard, sums), shards))
    damaged = [shard for shard, is_right in zip(shards, whole, strict=True) if not is_right]
    for shard in damaged:
        print(f"{directory / shard.file}: not what was written there; it is written again")
    return damaged


def _mend(
    source: Verified, damaged: list[Shard], options: Options, folder: Folder, *, device: torch.device, jobs: int
) -> None:
    """Write damaged files of a finished conversion again; they must get the checksums that they had."""
    _write_files(source, damaged, options, folder, device=device, jobs=jobs)
    sums, records = checksums.read(folder.directory), folder.records()
    for shard in damaged:
        for name, found in records[shard.file]["tensors"].items():
            if found != sums.get(name):
                raise CheckpointError(
                    f"{folder.directory / shard.file}: tensor '{name}': expected the SHA-256 of {checksums.FILE},"
                    f" {shown(sums.get(name))}, found {found}; remove the directory and convert again"
                )
    folder.finish()
    print(f"{folder.directory}: wrote {len(damaged)} damaged files again; the others are whole")


def _write(
    source: Verified, plan: Conversion, options: Options, folder: Folder, *, device: torch.device, jobs: int
) -> Tally:
    """Write the files that are not there yet, or not as they were written; returns the sum of all records."""
    records = folder.records()
    there = [shard for shard in plan.shards if shard.file in records]
    sums = {name: checksum for record in records.values() for name, checksum in record["tensors"].items()}
    damaged = _damaged(folder.directory, there, sums, jobs)
    left = [shard for shard in plan.shards if shard.file not in records or shard in damaged]
    if len(left) < len(plan.shards):
        print(f"{len(plan.shards) - len(left)} of {len(plan.shards)} files are there already")
    _write_files(source, left, options, folder, device=device, jobs=jobs)
    tally, records = Tally(), folder.records()
    for shard in plan.shards:
        tally.add(Tally.from_json(records[shard.file]["tally"]))
    return tally


def _write_files(
    source: Verified, left: list[Shard], options: Options, folder: Folder, *, device: torch.device, jobs: int
) -> None:
    _require_room(folder.directory, sum(shard.nbytes for shard in left))
    jobs = max(min(jobs, len(left)), 1)
    print(f"writing {len(left)} files, {jobs} at once, arithmetic on {device}", flush=True)
    progress, stop = Progress(sum(shard.cost for shard in left)), threading.Event()
    writer = ShardWriter(source, folder, options, device=device, progress=progress, stop=stop)
    try:
        _in_threads(writer, left, jobs, stop)
    finally:
        progress.end()


def _in_threads(writer: ShardWriter, shards: list[Shard], jobs: int, stop: threading.Event) -> None:
    threads = torch.get_num_threads()
    # One core a file where there are as many: threads of an operator would wait for each other.
    torch.set_num_threads(max(threads // jobs, 1))
    try:
        with ThreadPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(max(threads // jobs, 1),)) as pool:
            futures = [pool.submit(writer.write, shard) for shard in shards]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                stop.set()  # of no consequence where all are done
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, Stopped)), errors[0])
    finally:
        torch.set_num_threads(threads)


def _require_room(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed + ROOM:
        raise CheckpointError(
            f"{directory}: expected {(needed + ROOM) / 1e9:.2f} GB of free disk space, found {free / 1e9:.2f} GB;"
            " make room, or name a directory on another disk"
        )


def _publish(source: Path, verified: Verified, plan: Conversion, folder: Folder, tally: Tally) -> None:
    """Write index, descriptions, small files and manifest; config.json last, after every check."""
    target, records = folder.directory, folder.records()
    weight_map = {name: file for file, record in records.items() for name in record["tensors"]}
    index = {"metadata": {"total_size": plan.nbytes}, "weight_map": dict(sorted(weight_map.items()))}
    folder.write_json(target / INDEX, index)
    config = described(verified.raw, plan.after, plan.draft_weights())
    folder.write_json(target / MANIFEST, modelopt_words.manifest(config["quantization_config"]))
    for name in _small_files(source):
        folder.copy(source / name, name)
    sums = {name: checksum for record in records.values() for name, checksum in record["tensors"].items()}
    # A checkpoint is shared: no path of this machine in it.
    job = {**folder.job, "source": Path(folder.job["source"]).name}
    manifest = {MANIFEST_FIELD: job, "losses": tally.losses(), checksums.TENSORS: dict(sorted(sums.items()))}
    folder.write_json(target / checksums.FILE, manifest)
    # What inspect and the server will ask, asked before they can see it.
    summary = Inventory.open(target).verify(verified.config)
    check_quantization_config(config, summary)
    check_manifest(target, summary)
    folder.write_json(target / "config.json", config)


def _small_files(source: Path) -> Iterator[Path]:
    """Files beside the weights, relative to ``source``: tokenizer, documentation, code. Hidden ones are left out."""
    for directory, folders, files in os.walk(source):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            file = Path(directory) / name
            relative = file.relative_to(source)
            if name.startswith(".") or str(relative) in NOT_COPIED or file.suffix in WEIGHTS:
                continue
            if file.is_file() and file.stat().st_size <= MAX_SMALL_FILE:
                yield relative


def _announcement(source: Verified, plan: Conversion, options: Options) -> str:
    """Announce what happens to each class."""
    rows = [("class", "matrices", "stored as", "becomes", "values")]
    counts = Counter((MatrixClass.of(stem), was, plan.after[stem]) for stem, was in plan.before.items())
    for (kind, was, now), count in sorted(counts.items(), key=lambda item: list(MatrixClass).index(item[0][0])):
        rows.append((kind.value, str(count), was.value, "" if was is now else now.value, _what_happens(was, now)))
    lines = [f"{name:<11}{count:>8}  {was:<26}{now:<9}{values}" for name, count, was, now, values in rows]
    if plan.drafts or plan.draft_tensors:
        kept = f"{plan.draft_tensors} tensors, {plan.draft_bytes / 1e9:.2f} GB, byte for byte"
        lines.append(f"{source.summary.draft}: {len(plan.drafts)} matrices become NVFP4; {kept}")
    was_bytes = sum(entry.nbytes for entry in source.inventory.entries.values())
    lines.append(f"block scales by {options.scales.value}, gate and up {'' if options.tie_gate_up else 'not '}tied")
    lines.append(f"{was_bytes / 1e9:.2f} GB become {plan.nbytes / 1e9:.2f} GB in {len(plan.shards)} files")
    return "\n".join(lines)


def _what_happens(was: Storage, now: Storage) -> str:
    if was is now:
        return "kept, bit for bit"
    if was is Storage.NVFP4_COMPRESSED:
        return "kept, global scale inverted"
    return "exact if exponents fit" if was is Storage.MXFP4 else "lossy"


def _result(target: Path, plan: Conversion, tally: Tally) -> str:
    """Report what happened to each class."""
    return "\n".join([*tally.table(), *tally.inexact(), f"wrote {target}: {plan.nbytes / 1e9:.2f} GB"])
