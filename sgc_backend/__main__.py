"""``python -m sgc_backend demo``: what the package does, on this machine."""

from __future__ import annotations

import argparse
import sys

from .errors import SgcError


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status: 0 where every check held, 1 where one failed, 2 for bad usage."""
    parser = argparse.ArgumentParser(prog="python -m sgc_backend", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="serve a small language model through the backend and check it")
    demo.add_argument("--device", choices=("cuda", "emulated"), help="default: CUDA where there is one")
    demo.add_argument("--inner", choices=("inductor", "aot_eager", "eager"), help="what compiles a piece")
    demo.add_argument("--json", metavar="FILE", help="write what was found to FILE too")
    args = parser.parse_args(argv)

    from .demo.serve import json_to, run_demo  # loads the model's code; --help needs none of it

    try:
        with json_to(args.json) as write:
            result = run_demo(device=args.device, inner=args.inner)
            write(result)
    except SgcError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
