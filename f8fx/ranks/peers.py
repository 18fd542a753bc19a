"""Ranks that compile one model with different options: a warning.

Graphs whose weights FSDP2 has gathered hold no gathers, so that nothing hangs where ranks decide differently; but each
would compute something else. Ranks cannot wait for each other there: a pipeline's stages run one after the other, a replica
may be evaluated alone. So each writes down, in the process group's store, what it compiles a model with, and reads what its
two neighbours wrote before. Of two neighbours that differ the later one sees it; if all neighbours are alike all ranks are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from f8fx.options import Options
from f8fx.recipe import PRESETS, QuantSpec, Recipe
from f8fx.report import log
from f8fx.sources import source_hash
from f8fx.torch_private import local_part, process_store, process_store_read


@dataclass(eq=False)
class Peers:
    """The ranks that hold a model whose weights FSDP2 gathers in float8; what they compile it with.

    Attributes:
        ranks: none, if there is nobody to compare with.
        model: what it is known by on all of them.
        recipe: that the weights are gathered for; ``None``: unknown.
        mine: options that this rank has compiled graphs of it with, in words.
        has_warned: one of the weights was read outside of a graph.
    """

    ranks: tuple[int, ...]
    model: tuple[str, ...]
    recipe: Recipe | None = None
    mine: list[list[str]] = field(default_factory=list)
    has_warned: bool = False
    _recipes: set[str] = field(default_factory=set)

    def compare(self, options: list[str]) -> None:
        """Warns if a neighbour has compiled graphs of the model, but none with options that this rank has used."""
        found = process_store()
        if len(self.ranks) < 2 or options in self.mine or found is None:
            return
        store, rank = found
        if rank not in self.ranks:
            return
        self.mine.append(options)
        prefix = "f8fx/options/" + hashlib.sha256(repr((self.ranks, self.model)).encode()).hexdigest()[:32]
        store.set(f"{prefix}/{rank}", json.dumps(self.mine))
        place = self.ranks.index(rank)
        for other in {self.ranks[place - 1], self.ranks[(place + 1) % len(self.ranks)]}:
            theirs = json.loads(process_store_read(store, [f"{prefix}/{other}"])[0] or "[]")
            if theirs and not any(one in self.mine for one in theirs):
                log.warning(
                    "f8fx: ranks compile one model, whose weights FSDP2 gathers in float8, with different options: %s on rank "
                    "%d, %s on rank %d. They compute different things",
                    *(", ".join(sorted({*options} - {*theirs[-1]})) or "none of these", rank),
                    *(", ".join(sorted({*theirs[-1]} - {*options})) or "none of these", other),
                )

    def compare_recipe(self, recipe: Recipe) -> None:
        """Warns, once for each recipe, if the model's weights are gathered in other formats than it reads them in."""
        if (
            self.recipe is None
            or recipe.name in self._recipes
            or _of_weights(recipe) == _of_weights(self.recipe)
        ):
            return
        self._recipes.add(recipe.name)
        log.warning(
            "f8fx: a model is compiled with recipe %r, and its weights are gathered in the formats of %r "
            "(enable_float8_all_gather): give both the same",
            recipe.name,
            self.recipe.name,
        )


def _of_weights(recipe: Recipe) -> tuple[QuantSpec | None, ...]:
    return recipe.operand("output", "weight"), recipe.operand("grad_input", "weight")


def compare(example_inputs: Iterable[Any], options: Options) -> None:
    """For each model that a graph reads float8 weights of, :meth:`Peers.compare_recipe` and :meth:`Peers.compare`."""
    gathered = [getattr(local_part(value), "copies", None) for value in example_inputs]
    for peers in dict.fromkeys(copies.peers for copies in gathered if copies is not None):
        peers.compare_recipe(options.recipe)
        peers.compare(_in_words(options))


def _in_words(options: Options) -> list[str]:
    """What decides on a graph besides the graph."""
    values = dict(options.decision_key())
    if fn := options.filter_fn:
        values["filter_fn"] = getattr(fn, "uuid", None) or getattr(fn, "__qualname__", type(fn).__name__)
    values |= {name: sorted(values[name]) for name in ("filter_fqns", "only_fqns")}  # a set has no order
    if values["recipe"] == PRESETS.get(values["recipe"].name):
        values["recipe"] = values["recipe"].name
    values |= {"torch": torch.__version__, "code of f8fx": source_hash()[:12]}
    return [f"{name}={value!r}" for name, value in values.items()]
