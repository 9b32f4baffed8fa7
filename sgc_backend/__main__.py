"""The package from the command line: demo shows what it does on this machine, bench what it costs."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from .drafts import json_to
from .errors import OptionError, SgcError


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status: 0 where every check held, 1 where one failed, 2 for bad usage."""
    parser = argparse.ArgumentParser(prog="python -m sgc_backend", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="serve a small language model through the backend and check it")
    demo.add_argument("--speculative", action="store_true", help="decode with the guesses of a draft model")
    demo.add_argument("--device", choices=("cuda", "emulated"), help="default: CUDA where there is one")
    demo.add_argument("--inner", choices=("inductor", "aot_eager", "eager"), help="what compiles a piece")
    demo.add_argument("--json", metavar="FILE", help="write what was found to FILE too")
    bench = commands.add_parser("bench", help="measure; prints the environment first")
    bench.add_argument(
        "cases",
        nargs="*",
        metavar="CASE",
        help="overhead, decode, wrappers, piecewise, dynamo, dispatch, memory, shapes, capture, compile; default: all",
    )
    bench.add_argument("--peers", metavar="A,B", help="shapes: which peers; default: all that the device can run")
    bench.add_argument("--seconds", type=float, metavar="S", help="shapes: how long a peer may take until steady")
    bench.add_argument("--profile", action="store_true", help="capture: tell where the session's time goes")
    bench.add_argument("--json", metavar="FILE", help="write what was measured to FILE too")
    bench.add_argument("--plot", metavar="FILE", help="draw what was measured into FILE too; needs matplotlib")
    args = parser.parse_args(argv)
    if args.command == "bench" and args.cases:
        limited = args.peers is not None or args.seconds is not None
        if limited and "shapes" not in args.cases:
            bench.error(f"--peers and --seconds are for the case shapes, got {', '.join(args.cases)}")
        if args.profile and "capture" not in args.cases:
            bench.error(f"--profile is for the case capture, got {', '.join(args.cases)}")

    try:
        with json_to(args.json) as write, contextlib.ExitStack() as stack:
            if args.command == "bench":
                from .bench.plot import plot_to

                plot = stack.enter_context(plot_to(args.plot))
                given = {"peers": args.peers, "seconds": args.seconds}
                options = {"shapes": {k: v for k, v in given.items() if v is not None}}
                result = run_bench(args.cases, {**options, "capture": {"profile": True} if args.profile else {}})
                plot(result)
            elif args.speculative:
                from .demo.speculative import run_speculative_demo

                result = run_speculative_demo(device=args.device, inner=args.inner)
            else:
                from .demo.serve import run_demo

                result = run_demo(device=args.device, inner=args.inner)
            write(result)
    except SgcError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 1 if result.get("failed") else 0


def run_bench(names: list[str], options: dict[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    """Run benchmark cases by name (none: all) and return what they measured, with the environment.

    Args:
        options: of cases, by name.

    Raises:
        OptionError: a name that is no case, or a bad option.
    """
    from .bench import CASES, environment  # loads what it measures; --help needs none of it

    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise OptionError(f"no bench case {', '.join(unknown)}; there are: {', '.join(CASES)}")
    result: dict[str, Any] = {"environment": environment()}
    for name, value in result["environment"].items():
        print(f"{name}: {value}")
    for name in names or list(CASES):
        result[name] = CASES[name](print, **(options or {}).get(name, {}))
    result["failed"] = [f"{name}: {what}" for name in result for what in result[name].get("failed", ())]
    return result


if __name__ == "__main__":
    sys.exit(main())
