"""How one Dynamo graph is laid out before it is called: split, compiled, and what its key holds."""

from __future__ import annotations

import functools
import logging

from torch import fx

from .below_autograd import prepare
from .capturable import is_kept, why_not_capturable
from .config import Options
from .device import Device
from .errors import StrictError
from .facts import gather_facts
from .groups import PIECE, Ref
from .inputs import classify
from .interpret import note_inputs
from .keys import key_reader, key_symbols
from .marks import Marks
from .padding import padding_of, split_for_padding
from .piece import Programs, compile_pieces
from .symbols import Symbols
from .walk import Walk

log = logging.getLogger(__name__)


class Layout:
    """One Dynamo graph's groups and their callables.

    Args:
        gm: what Dynamo hands over.
        options, marks, device: where it is cut, and for what it is compiled.
        programs: what was compiled for the same graph before, which is used again; see `compile_pieces`.

    Attributes:
        clones: whether results are the caller's own.
        split: the groups.
        symbols: the sizes and numbers of its inputs.
        inputs: the placeholders, by kind.
        key_symbols: what a key holds, in order.
        sizes: places in a key that hold sizes of dimensions.
        key: a call's key, of its arguments.
        padding, not_padded: how it is padded; None, and why not.
        compiled: each group's callable.
        uncompiled: pieces that run eagerly, by index, and why.
        programs: what was compiled, by what it computes.
        recordable: each group's callable as the device can record it.
        walk: the uncaptured way through it.
    """

    def __init__(
        self, gm: fx.GraphModule, options: Options, marks: Marks, device: Device, programs: Programs | None = None
    ) -> None:
        self.gm, self.options, self.marks, self.device = gm, options, marks, device
        # What a graph in front of a graph break returns is used behind it, when the next graph has been replayed.
        reason = getattr(gm, "compile_subgraph_reason", None)
        self.clones = options.outputs == "clone" or bool(getattr(reason, "graph_break", False))
        note_inputs(gm)
        facts = gather_facts(gm, device.type)
        self.symbols = Symbols(gm)
        found = split_for_padding(
            gm,
            facts,
            functools.cache(lambda node: why_not_capturable(node, facts, marks)),
            self.symbols,
            options,
            keep=lambda node: is_kept(node, facts, marks),
            wrap_numbers=options.inner != "eager",
        )
        self.split = found.split
        read = {r.name for g in self.split.pieces for r in g.inputs if isinstance(r, Ref)}
        read |= {name for g in self.split.pieces for name in g.reads}
        self.inputs = classify(gm, read, {name for g in self.split.groups for name in g.writes})
        self.key_symbols = self.symbols.bound(key_symbols(gm, self.split, self.inputs, self.symbols))
        self.padding, self.not_padded = None, found.why_not
        if found.prefix is not None:
            self.padding = padding_of(
                gm, self.split, found.prefix, self.symbols, self.key_symbols, self.inputs, options
            )
        self.sizes = [k for k, s in enumerate(self.key_symbols) if s in self.symbols.dimensions]
        self.key = key_reader(self.symbols, self.key_symbols)
        prepare(node.target for node in gm.graph.nodes)  # of all: what isn't cut now may be, once a capture fails
        self.compiled, self.uncompiled, self.programs = compile_pieces(self.split.groups, options.inner, programs)
        # Emulated recordings can't see into compiled code; in a graph of eager pieces they can.
        self.recordable = [
            device.opaque(fn) if g.kind == PIECE and options.inner != "eager" else fn
            for g, fn in zip(self.split.groups, self.compiled, strict=True)
        ]
        self.walk = Walk(self.split, self.compiled, self.symbols, [i.name for i in self.inputs])

    def without(self, op: str) -> Layout:
        """The same graph with one op more cut, in which a capture failed; nothing is compiled anew."""
        return Layout(self.gm, self.options, self.marks.with_failed(op), self.device, self.programs)

    def tell_uncompiled(self, name: str) -> None:
        """Say once which pieces the inner compiler can't take; they run eagerly, and are captured all the same.

        Raises:
            StrictError: strict, and there are some.
        """
        for index, found in self.uncompiled.items():
            if self.options.strict:
                raise StrictError(
                    f"strict=True, and {self.options.inner} can't compile piece {index} of {name}: {found.cause}"
                ) from found.error
        if self.uncompiled:
            index, found = next(iter(self.uncompiled.items()))
            more = f" (and {len(self.uncompiled) - 1} more pieces)" if len(self.uncompiled) > 1 else ""
            text = "piece %d of %s%s runs eagerly, not compiled with %s: %s"
            log.warning(text, index, name, more, self.options.inner, found.cause)
