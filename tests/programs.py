"""Random programs that the backend must run as eager does: made, shrunk, and soaked.

    python tests/programs.py --count 20000 --seed 1 [--jobs 2] [--device cuda]

A program is made by a function ``choose(options) -> one of them``: hypothesis draws and shrinks, a seeded generator
soaks. Each soaked program has a seed of its own, ``<seed>:<number>``, that makes it again (``--only``).
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import logging
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from program_compare import Difference
from program_lines import DYNAMO_TEMPLATES, ROWS, TEMPLATES, D, Scope, is_full
from program_ops import ATEN, CUSTOM
from program_run import run_case
from program_world import COMPILED_EVENTS, EVENTS, Call, Case

Choose = Callable[[Sequence[Any]], Any]
SIZES = (6, 10, 2)  # at which lines are tried
OTHER_RESULTS = (
    "x.shape[0]", "None", "k", "x.shape[0] * 3 + 1", "m.cache[1:]", "x[1:]", "m.w.t()", "m.count", "m.ring",
)  # fmt: skip
BREAKING = ("m.count = ", "m.ring = ", "graph_break", ".item()", "> 0]", "> 1]", "nonzero", "masked_select", ".cpu()")
LAYOUTS = ("fresh",) * 8 + ("offset", "wide", "strided", "t", "expanded", "prev", "prev", "prev", "again", "cache")


def make_case(choose: Choose, dynamo: bool = False) -> Case:
    """One program and its calls."""
    scope = Scope(choose, tuple(_start(n) for n in SIZES), ["x", "y", "m.w", "m.b", "m.cache", "m.ring", "idx"])
    lines: list[str] = []
    wanted = choose((2, 4, 6, 8, 10, 14))
    for _ in range(3 * wanted):
        line = choose(DYNAMO_TEMPLATES if dynamo else TEMPLATES)(scope)
        if line and scope.add(line):
            lines.append(line)
        if len(lines) >= wanted:
            break
    fresh = [name for name in scope.names if name.startswith("v")]
    returned = ["x"]
    if fresh:
        late = choose((True, True, False))
        returned = [choose(fresh[-4:] if late else scope.names) for _ in range(choose((1, 2, 3, 4)))]
    if choose((False, False, False, True)):
        returned.append(choose(OTHER_RESULTS))
    options = _options(choose)
    if dynamo:
        returned.append(f"{{'nested': [{returned[0]}, ({returned[-1]}, k)], 'n': x.shape[0]}}")
        body = "\n".join(lines)
        # AOTAutograd leaves out draws that nothing reads, and takes no custom op that returns its argument.
        plain = not any(word in body for word in ("rand", "dropout", "bernoulli", "left", "same", "halve_"))
        options["inner"] = choose(("eager", "aot_eager")) if plain else "eager"
        # Static results last to the next replay, be it in the same call: of a graph behind a break, or as an attribute.
        if any(word in body for word in BREAKING):
            options["outputs"] = "clone"
    if options["outputs"] == "static":  # a result that can be an argument of the next call
        likes = [name for name in fresh if is_full(scope.value(name)) and scope.value(name).shape[0] == SIZES[0]]
        returned.append(choose(likes or ["x * 2"]))
    grad = choose((False, False, False, True))
    ring = choose(("own", "own", "cache")) if options.get("inner", "eager") == "eager" else "own"
    return Case(
        tuple(lines),
        tuple(returned),
        _calls(choose, options, grad),
        options,
        dynamo,
        choose((True, True, None, False)) if dynamo else choose((True, True, True, False)),
        grad,
        ring,
    )


def _start(n: int) -> dict[str, Any]:
    """A program's inputs at size ``n``, on which its lines are tried."""
    w = torch.ones(D, D)
    m = SimpleNamespace(
        w=w, b=torch.ones(D), tied=w, cache=torch.ones(ROWS, D), ring=torch.ones(4, D), count=torch.ones(())
    )
    x, y, idx = torch.ones(n, D), torch.ones(n, D), torch.arange(n)
    return {"torch": torch, "F": F, "m": m, "x": x, "y": y, "idx": idx, "z": torch.ones(()), "k": 2, "f": 0.5}


def _options(choose: Choose) -> dict[str, Any]:
    options: dict[str, Any] = {}
    custom = [f"sgc_prop::{name}" for name in CUSTOM if choose((True, True, False))]
    aten = {f"aten::{choose(ATEN)}" for _ in range(choose((0, 0, 1, 2, 5)))}
    options["cut_ops"] = (*custom, *sorted(aten))
    options["outputs"] = choose(("clone", "clone", "static"))
    options["capture"] = choose(("lazy", "lazy", "lazy", "session"))
    options["capture_sizes"] = choose((None, None, "auto", "auto", "auto", (3, 5)))
    options["pad"] = choose(("auto", "auto", "auto", "never"))
    options["max_recordings"] = choose((64, 64, 1, 2))
    options["strict"] = choose((False,) * 7 + (True,))
    return options


def _calls(choose: Choose, options: dict[str, Any], grad: bool) -> tuple[Call, ...]:
    sizes = choose(
        (
            (5,),
            (5, 3),
            (3, 5, 8),
            (1, 5),
            (0, 5),
            (2, 4),
            (5, 9, 1, 0),
            (17, 5),
            (9, 10),
            (17, 18, 19, 20),
            (5, 13, 14),
            (33, 39),
        )
    )
    modes = choose((("no_grad",),) * 3 + (("inference",), ("no_grad", "inference"), ("no_grad", "grad")))
    # A few ways to call it, each again and again: most calls must be replays.
    layouts = LAYOUTS + ("prev",) * (12 if options["outputs"] == "static" else 0)
    ways = [_way(choose, layouts, lively=bool(number)) for number in range(choose((1, 2, 3)))]
    quiet = ("",) * choose((6, 12, 36))
    seed = choose(range(1000))
    calls = []
    for number in range(choose((6, 10, 16, 24))):
        way = choose(ways)
        calls.append(
            dataclasses.replace(
                way,
                n=choose(sizes),
                mode=choose(modes),
                before=choose(quiet + EVENTS + COMPILED_EVENTS),
                session=options["capture"] == "session" and choose((True, False)),
                seed=seed * 100 + number,
            )
        )
    return tuple(calls)


def _way(choose: Choose, layouts: tuple[str, ...], lively: bool) -> Call:
    if not lively and choose((True, False)):
        return Call(5)
    return Call(
        n=5,
        x=choose(layouts),
        y=choose((*layouts, "x", "x", "over", "over", "over", "halves")),
        z=choose((False, True)),
        k=choose((2, 3)),
        f=choose((0.5, 0.0, -0.0)),
    )


# -- shrinking ---------------------------------------------------------------------------------------------------------


def shrink(case: Case, fails: Callable[[Case], bool], seconds: float = 60.0) -> Case:
    """A smaller case that still fails, found by leaving things out one after the other."""
    end = time.monotonic() + seconds
    progress = True
    while progress and time.monotonic() < end:
        progress = False
        for smaller in _smaller(case):
            if time.monotonic() > end:
                break
            if fails(smaller):
                case, progress = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    change = dataclasses.replace
    for part in ("calls", "lines", "returned"):
        items = getattr(case, part)
        for size in (len(items) // 2, 1):
            for start in range(len(items) - size, -1, -size) if size else ():
                left = items[:start] + items[start + size :]
                if left or part == "lines":
                    yield change(case, **{part: left})
    for position, call in enumerate(case.calls):
        default = Call(call.n, session=call.session, seed=call.seed)
        for name in ("x", "y", "z", "k", "f", "mode", "before"):
            if getattr(call, name) != getattr(default, name):
                simpler = change(call, **{name: getattr(default, name)})
                yield change(case, calls=(*case.calls[:position], simpler, *case.calls[position + 1 :]))
    plain = {"capture": "lazy", "outputs": "clone", "capture_sizes": None, "max_recordings": 64, "strict": False}
    for name, value in plain.items():
        if case.options.get(name, value) != value:
            yield change(case, options={**case.options, name: value})
    cuts = case.options.get("cut_ops", ())
    for position in range(len(cuts)):
        yield change(case, options={**case.options, "cut_ops": cuts[:position] + cuts[position + 1 :]})
    for name, value in (("grad", False), ("ring", "own"), ("dynamic", False), ("dynamo", False)):
        if getattr(case, name) != value and case.options.get("inner", "eager") == "eager":
            yield change(case, **{name: value})


# -- soaking -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Report:
    """What a stretch of programs gave: how many ended how, and the text of each that differed."""

    ended: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    failures: list[str] = dataclasses.field(default_factory=list)
    counters: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


def case_of(seed: str, *, dynamo: bool | float) -> Case:
    """The program of a seed; ``dynamo``: whether Dynamo compiles it, or how likely."""
    generator = random.Random(seed)
    return make_case(generator.choice, generator.random() < dynamo)


def attempt(case: Case, device: str) -> tuple[str, BaseException | None]:
    """How a case ended, and the difference or the error of the harness."""
    try:
        return run_case(case, device, 1e-3 if device == "cuda" else 0.0), None
    except Exception as error:
        return "different" if isinstance(error, Difference) else "error", error


def soak(seeds: Sequence[str], device: str, dynamo_share: float, shrinks: bool) -> Report:
    """Run the programs of ``seeds``."""
    report = Report()
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # programs that can't be traced
    logging.getLogger("sgc_backend").setLevel(logging.ERROR)
    for seed in seeds:
        case = case_of(seed, dynamo=dynamo_share)
        ended, error = attempt(case, device)
        report.ended[ended] += 1
        if error is None:
            continue
        text = str(error)
        if shrinks:
            kind = _kind(error)
            case = shrink(case, lambda c, kind=kind: (e := attempt(c, device)[1]) is not None and _kind(e) == kind)
            _, error = attempt(case, device)
            text = str(error) if error is not None else f"(not seen again) {text}"
        trace = "".join(traceback.format_exception(error)[-12:]) if error is not None else ""
        report.failures.append(f"--- seed {seed}: {ended}: {text}\n{case.text()}\n{trace}")
    return report


def _kind(error: BaseException) -> str:
    """What stays the same of a difference while it is shrunk."""
    return type(error).__name__ + ("raised" if "raised" in str(error) else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dynamo", type=float, default=0.03, help="share of programs that Dynamo compiles")
    parser.add_argument("--only", help="one program's seed, <seed>:<number>")
    parser.add_argument("--no-shrink", action="store_true")
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.count)
    seeds = [options.only] if options.only else [f"{options.seed}:{i}" for i in numbers]
    chunks = [seeds[i : i + 50] for i in range(0, len(seeds), 50)]
    total, start, done = Report(), time.monotonic(), 0
    arguments = (options.device, options.dynamo, not options.no_shrink)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for report in pool.map(soak, chunks, *([a] * len(chunks) for a in arguments)):
            total.ended += report.ended
            done = sum(total.ended.values())
            for failure in report.failures:
                print(failure, flush=True)
            if done % 500 == 0:
                print(f"{done} programs, {time.monotonic() - start:.0f} s: {dict(total.ended)}", flush=True)
    differences = total.ended["different"] + total.ended["error"]
    print(f"{done} programs, seed {options.seed}: {differences} differences; {dict(total.ended)}")
    return 1 if differences else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
