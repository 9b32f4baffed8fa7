"""memory_report: where the bytes of the pools are."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from .pool import GraphPool
from .pool_memory import Entry
from .pools import pools

MIB = 1 << 20


@dataclass(frozen=True)
class Owned:
    """What one owner's recordings of one key added. All in bytes.

    Attributes:
        owner: name of the compiled graph or wrapper.
        key: sizes and numbers that it was recorded for, as text.
        recordings: how many graphs.
        added: bytes that the pool grew by for them; 0 where they fit into what was there.
        outside: bytes of device memory outside of the allocator (executables of graphs). The driver takes it in large
            steps: here are those that came while these were recorded.
        parts: bytes added by each piece, by name; empty where nothing was added or the recording is whole.
    """

    owner: str
    key: str
    recordings: int
    added: int
    outside: int
    parts: dict[str, int]


@dataclass(frozen=True)
class PoolMemory:
    """One pool. All in bytes.

    Attributes:
        device, lane: which pool.
        reserved: held from the device; the sum of what ``owners`` added and of ``base``.
        live: of that, in tensors that are alive: nothing where only recordings are left.
        free_runs, largest_free: how many runs of free memory, and the longest.
        base: what no live recording added: the keeper's, and what recordings that are gone left to be used again.
        outside: device memory outside of the allocator.
        executables: what runs the recordings; fewer than these where the sizes of a piece share one.
        owners: by owner and key, in the order of recording.
        alone: what each owner would take with a pool of its own, where a session measured it.
        pool_each: their sum, or None where not every owner was measured.
    """

    device: str
    lane: str | None
    reserved: int
    live: int
    free_runs: int
    largest_free: int
    base: int
    outside: int
    executables: int
    owners: tuple[Owned, ...]
    alone: dict[str, int]
    pool_each: int | None


@dataclass(frozen=True)
class MemoryReport:
    """Every pool of the process; ``str()`` is a table, `as_dict` and `to_json` the same as data."""

    pools: tuple[PoolMemory, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain types, all sizes in bytes."""
        return asdict(self)

    def to_json(self) -> str:
        """`as_dict` as JSON."""
        return json.dumps(self.as_dict(), indent=1)

    def __str__(self) -> str:
        if not self.pools:
            return "no pool"
        return "\n".join(line for pool in self.pools for line in _lines(pool))


def memory_report() -> MemoryReport:
    """Where the bytes are: per pool and per owner. Reads the allocator's own snapshot; nothing is synchronised."""
    return MemoryReport(tuple(_of(pool) for pool in pools()))


def _of(pool: GraphPool) -> PoolMemory:
    with pool.lock:
        segments = pool.device.pool_segments(pool.handle)
        entries, shared = list(pool.ledger.values()), pool.executables
        alone = dict(pool.alone)
    runs = [run for segment in segments for run in _free_runs(segment["blocks"])]
    reserved = sum(s["total_size"] for s in segments)
    rows: dict[tuple[str, str], list[Any]] = {}
    for entry in entries:
        rows.setdefault((entry.owner, entry.key), []).append(entry)
    owners = tuple(
        Owned(
            owner,
            key,
            len(group),
            sum(e.added for e in group),
            sum(e.outside for e in group),
            _parts(group),
        )
        for (owner, key), group in rows.items()
    )
    measured = {o.owner for o in owners} <= set(alone) and bool(owners)
    return PoolMemory(
        device=str(pool.device),
        lane=pool.lane,
        reserved=reserved,
        live=sum(s["active_size"] for s in segments),
        free_runs=len(runs),
        largest_free=max(runs, default=0),
        base=reserved - sum(o.added for o in owners),
        outside=sum(o.outside for o in owners),
        executables=len(entries) - (shared.graphs - shared.alive if shared is not None else 0),
        owners=owners,
        alone=alone,
        pool_each=sum(alone[name] for name in {o.owner for o in owners}) if measured else None,
    )


def _parts(entries: Iterable[Entry]) -> dict[str, int]:
    """Bytes by piece: a key has one recording of it for each set of weights."""
    found: Counter[str] = Counter()
    for entry in entries:
        if entry.part and entry.added:
            found[entry.part] += entry.added
    return dict(found)


def _free_runs(blocks: Iterable[dict[str, Any]]) -> Iterable[int]:
    """Lengths of the runs of free blocks in one segment, whose blocks come in the order of their addresses."""
    run = 0
    for block in blocks:
        if block["state"] == "inactive":
            run += block["size"]
        elif run:
            yield run
            run = 0
    if run:
        yield run


def _lines(pool: PoolMemory) -> list[str]:
    lane = f", lane {pool.lane!r}" if pool.lane else ""
    lines = [
        f"pool of {pool.device}{lane}: {pool.reserved / MIB:.2f} MiB reserved, {pool.live / MIB:.2f} live, "
        f"{pool.free_runs} free runs, the longest {pool.largest_free / MIB:.2f}; "
        f"{pool.outside / MIB:.2f} MiB outside the allocator for {pool.executables} executables",
        f"  {'owner':24} {'key':20} {'graphs':>6} {'added MiB':>10} {'outside MiB':>12}",
    ]
    for row in pool.owners:
        lines.append(
            f"  {row.owner:24} {row.key:20} {row.recordings:6} {row.added / MIB:10.2f} {row.outside / MIB:12.2f}"
        )
    lines.append(f"  {'(keeper, and left over)':24} {'':20} {'':6} {pool.base / MIB:10.2f}")
    for name, alone in pool.alone.items():
        lines.append(f"  {name} alone: {alone / MIB:.2f} MiB")
    each = "not measured (open the session with measure=True)"
    if pool.pool_each is not None:
        each = f"{pool.pool_each / MIB:.2f} MiB"
    lines.append(f"  with a pool each: {each}")
    return lines
