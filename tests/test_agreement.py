"""Ranks that decide differently get an error, all of them, and none waits for ever. Threads stand for ranks."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx

from f8fx.cache import CacheKey
from f8fx.graph_pass import GraphPass, PassError
from f8fx.options import Options
from f8fx.ranks import agreement, ledger, peers
from f8fx.ranks.agreement import _Graph, checked, confirm
from f8fx.ranks.ledger import RankDisagreement, others_known
from f8fx.ranks.peers import Peers
from f8fx.recipe import PRESETS
from f8fx.report import Traffic
from f8fx.sources import source_hash

BEFORE = ("all_gather_into_tensor bf16[96,64]",)
MOVED = ("all_reduce i32[]", "all_gather_into_tensor e4m3[96,64]")
#: Of a wait that ends in vain, and of one that does not.
SHORT, LONG = timedelta(seconds=1), timedelta(seconds=60)


@pytest.fixture(params=["hash", pytest.param("file", marks=pytest.mark.long)])
def store(request, tmp_path):
    """With the extended interface that TCP stores have; and without, as ranks of :mod:`tests.distributed` have it."""
    return dist.HashStore() if request.param == "hash" else dist.FileStore(str(tmp_path / "store"), 3)


@pytest.fixture
def ranks(store, monkeypatch):
    """Confirms what each rank sends, in a thread of its own; what each returned, or raised."""
    pool = ThreadPoolExecutor(3)
    current = threading.local()
    monkeypatch.setattr(ledger, "process_store", lambda: (store, current.rank))
    monkeypatch.setattr(ledger, "group_timeout", lambda group: current.timeout)
    monkeypatch.setattr(ledger, "ALONE", timedelta(seconds=0.5))
    monkeypatch.setattr(ledger, "_AGREED", {})

    def run(*calls):
        def one(rank, call):
            current.rank, current.timeout = rank, call.timeout
            time.sleep(call.after)
            try:
                return call()
            except RankDisagreement as error:
                return error

        return [f.result(timeout=30) for f in [pool.submit(one, i, c) for i, c in enumerate(calls) if c]]

    return run


@dataclass
class Sending:
    """What a rank's graph sends, the timeout of its process group, and seconds until it has compiled."""

    traffic: list[Traffic]
    timeout: timedelta
    after: float

    def __call__(self):
        confirm(self.traffic)


def sending(*sends, before=BEFORE, timeout=SHORT, of=(0, 1, 2), after=0.0, is_left=False):
    return Sending([Traffic(of, before, sends, is_left=is_left)], timeout, after)


def leaving(after=0.0):
    """``wire="off"``."""
    return sending(*BEFORE, timeout=LONG, after=after, is_left=True)


@dataclass
class Turns:
    """What a rank does one after the other, and seconds before each."""

    turns: list[Sending]
    pauses: list[float]
    timeout: timedelta = LONG
    after: float = 0.0

    def __call__(self):
        for turn, pause in zip(self.turns, self.pauses, strict=True):
            time.sleep(pause)
            turn()


def test_ranks_that_agree_go_on(ranks):
    assert ranks(*[sending(*MOVED, timeout=LONG)] * 3) == [None] * 3


def test_one_rank_that_disagrees_is_an_error_on_all(ranks):
    start = time.monotonic()
    found = ranks(sending(*MOVED), sending(*MOVED), sending(*BEFORE, timeout=timedelta(minutes=5)))
    assert [type(error) for error in found] == [RankDisagreement] * 3
    assert time.monotonic() - start < 20  # the answer is there: nobody waits for the time to run out
    message = str(found[0])
    assert "Collective 0 is 'all_reduce i32[]' on rank 0" in message
    assert "'all_gather_into_tensor bf16[96,64]' on rank 2" in message
    assert "wire" in message


def test_a_later_collective_that_differs_is_named(ranks):
    found = ranks(*(sending(*sends, timeout=LONG) for sends in (MOVED, (MOVED[0], *BEFORE), MOVED)))
    assert [type(error) for error in found] == [RankDisagreement] * 3
    assert f"Collective 1 is '{MOVED[1]}' on rank 0 and '{BEFORE[0]}' on rank 1" in str(found[0])


def test_a_later_graph_with_the_same_gathers_may_be_decided_anew(ranks):
    """Another recipe: what was agreed on before is no disagreement."""
    assert ranks(*[sending(*MOVED, timeout=LONG)] * 3) == [None] * 3
    assert ranks(*[sending(*BEFORE, timeout=LONG)] * 3) == [None] * 3


def test_a_disagreement_in_a_later_compile_is_an_error_on_all(ranks):
    assert ranks(*[sending(*BEFORE, timeout=LONG)] * 3) == [None] * 3
    start = time.monotonic()
    anew = sending(*MOVED, timeout=LONG)
    found = ranks(anew, sending(*BEFORE, timeout=LONG, after=0.5), anew)
    assert [type(error) for error in found] == [RankDisagreement] * 3
    assert time.monotonic() - start < 10
    # and is over then: the next compile is compared as ever
    assert ranks(*[sending("else", timeout=LONG)] * 3) == [None] * 3


def test_who_decides_anew_finds_out_that_the_others_have_gone_on(ranks):
    assert ranks(*[sending(*BEFORE, timeout=LONG)] * 3) == [None] * 3
    anew = sending(*MOVED, timeout=timedelta(seconds=2), after=0.5)
    found = ranks(anew, sending(*BEFORE, timeout=LONG), anew)
    assert found[1] is None  # it may be the only one to compile, for what it can know
    for error in (found[0], found[2]):
        assert isinstance(error, RankDisagreement)
        assert "rank 1 compiled none within 1 s" in str(error)  # half of the process group's timeout


def test_a_rank_that_compiles_again_alone_goes_on_at_once(ranks, monkeypatch):
    monkeypatch.setattr(ledger, "ALONE", LONG)
    assert ranks(*[sending(*MOVED, timeout=LONG)] * 3) == [None] * 3
    start = time.monotonic()
    assert ranks(sending(*MOVED, timeout=LONG)) == [None]
    assert time.monotonic() - start < 5


def test_a_rank_that_compiles_one_of_several_graphs_again_alone_goes_on(ranks):
    """Another graph with the same gathers was decided otherwise, so the others may be about to disagree."""
    for sends in (MOVED, BEFORE):
        assert ranks(*[sending(*sends, timeout=LONG)] * 3) == [None] * 3
    assert ranks(sending(*MOVED, timeout=LONG)) == [None]
    # and is not one ahead of the others from then on
    found = ranks(sending(*BEFORE), sending(*BEFORE), sending(*MOVED))
    assert [type(error) for error in found] == [RankDisagreement] * 3


def test_training_and_evaluation_are_decided_apart(ranks):
    assert ranks(*[sending(*BEFORE, timeout=LONG)] * 3) == [None] * 3
    (traffic,) = sending(*BEFORE).traffic
    training = replace(traffic, sends=MOVED, training=True)
    assert ranks(*[Sending([training], LONG, 0.0)] * 3) == [None] * 3
    known = Calling(lambda _: torch.tensor(len(others_known(_Graph.of(training)))))
    assert ranks(*[known] * 3) == [0] * 3


# -- in each call


@pytest.fixture
def calls(ranks, monkeypatch):
    """What a rank's graph does in a call, and how often it asked the others, who run ``others[0]``, before that."""
    asked, others = [], []

    def same_on_all(digest, group, device):
        asked.append(digest)
        return torch.tensor(asked[0] == digest if others else True)

    monkeypatch.setattr(agreement, "same_on_all", same_on_all)

    def call(*sends):
        run = checked(lambda x: x + 1, sending(*sends).traffic, [torch.ones(1)])
        (result,) = ranks(Calling(run))
        return result

    return call, asked, others


@dataclass
class Calling:
    run: Callable[..., Any]
    timeout: timedelta = LONG
    after: float = 0.0

    def __call__(self):
        return self.run(torch.ones(1)).item()


def test_a_graph_of_which_all_have_one_is_not_compared_in_calls(ranks, calls):
    call, asked, _ = calls
    for _ in range(2):
        assert ranks(*[sending(*MOVED, timeout=LONG)] * 3) == [None] * 3
    assert call(*MOVED) == 2 and not asked


def test_graphs_of_two_decisions_are_compared_in_each_call(ranks, calls):
    call, asked, others = calls
    for sends in (MOVED, BEFORE):
        assert ranks(*[sending(*sends, timeout=LONG)] * 3) == [None] * 3
    assert call(*MOVED) == call(*MOVED) == 2
    assert len(asked) == 2
    others.append(MOVED)
    error = call(*BEFORE)
    assert isinstance(error, RankDisagreement)
    assert f"Collective 0 would be '{BEFORE[0]}' on this rank and '{MOVED[0]}' on another" in str(error)


def test_each_group_of_a_graph_is_compared_once_in_each_call(ranks, calls):
    _, asked, _ = calls
    for sends in (MOVED, BEFORE):
        both = [Traffic(of, BEFORE, sends) for of in ((0, 1, 2), (0, 1))]
        turns = (Sending(traffic, LONG, 0.0) for traffic in (both, both, both[:1]))
        assert ranks(*turns) == [None] * 3
    run = checked(lambda x: x + 1, both * 2, [torch.ones(1)])
    assert ranks(Calling(run)) == [2] and len(asked) == 2


def test_a_graph_that_has_nothing_to_compare_is_called_itself():
    def graph(x):
        return x

    assert checked(graph, [], [torch.ones(1)]) is graph
    assert checked(graph, sending(*MOVED).traffic, [3]) is graph


def test_graphs_are_compared_on_the_device_that_their_collectives_run_on(ranks, monkeypatch):
    """NCCL carries nothing on a CPU, where the first input may be, a number say."""
    for sends in (MOVED, BEFORE):
        assert ranks(*[sending(*sends, timeout=LONG)] * 3) == [None] * 3
    devices = []
    monkeypatch.setattr(_Graph, "compare", lambda self, others, device: devices.append(device.type))
    inputs = [torch.ones(1), torch.ones(1, device="meta")]
    ranks(Calling(checked(lambda x: x, sending(*MOVED).traffic, inputs)))
    assert devices == ["meta"]


def test_on_a_gpu_the_error_is_an_assertion_on_the_device(ranks, monkeypatch):
    """The host waits for no answer."""
    for sends in (MOVED, BEFORE):
        assert ranks(*[sending(*sends, timeout=LONG)] * 3) == [None] * 3
    asserted = []
    monkeypatch.setattr(agreement, "assert_on_device", lambda *args: asserted.append(args))
    monkeypatch.setattr(agreement, "same_on_all", lambda *args: torch.tensor(False))
    run = checked(lambda x: x + 1, sending(*MOVED).traffic, [torch.ones(1, device="meta")])
    assert ranks(Calling(run)) == [2]
    ((same, message),) = asserted
    assert not same and "ranks run graphs that were decided differently" in message


def test_what_other_processes_agreed_on_before_is_not_compared(ranks, calls, monkeypatch):
    call, asked, _ = calls
    for sends in (MOVED, BEFORE):
        assert ranks(*[sending(*sends, timeout=LONG)] * 3) == [None] * 3
    fresh = dist.HashStore()
    rank = ledger.process_store
    monkeypatch.setattr(ledger, "process_store", lambda: (fresh, rank()[1]))
    assert ranks(*[sending(*MOVED, timeout=LONG)] * 3) == [None] * 3
    assert call(*MOVED) == 2 and not asked


def test_a_rank_that_decides_anew_alone_is_an_error_on_it(ranks):
    assert ranks(*[sending(*MOVED, timeout=LONG)] * 3) == [None] * 3
    start = time.monotonic()
    (error,) = ranks(sending(*BEFORE, timeout=timedelta(seconds=2)))
    assert time.monotonic() - start < 2  # before a collective of the others has waited for too long
    assert isinstance(error, RankDisagreement)
    assert "rank 1, 2 compiled none within 1 s, so it would send what was decided before" in str(error)
    assert "on rank 0 and 'all_reduce i32[]' on rank 1" in str(error)
    # what it decided is forgotten
    assert ranks(*[sending(*BEFORE, timeout=LONG)] * 3) == [None] * 3


def test_a_graph_with_other_gathers_is_another(ranks):
    """Of which the others have decided nothing before."""
    assert ranks(*[sending(*MOVED, timeout=LONG)] * 3) == [None] * 3
    (error,) = ranks(sending(*BEFORE, before=BEFORE * 2))
    assert (
        "rank 0 compiled a graph with 2 all-gathers over ranks [0, 1, 2], but rank 1, 2 compiled no"
        in str(error)
    )


def test_a_rank_that_never_comes_is_an_error_not_a_hang(ranks):
    found = ranks(sending(*MOVED), sending(*MOVED))
    for error in found:
        assert isinstance(error, RankDisagreement) and "rank 2 compiled no such graph within 1 s" in str(
            error
        )


def test_ranks_that_leave_gathers_as_they_are_wait_for_nobody(ranks):
    for only in range(3):
        calls = [leaving() if rank == only else None for rank in range(3)]
        assert ranks(*calls[: only + 1]) == [None]


@pytest.mark.parametrize("after", [(0, 0, 0.2), (0.2, 0.2, 0)], ids=["later", "first"])
def test_a_rank_that_leaves_gathers_as_they_are_alone_is_an_error_on_the_others(ranks, after):
    """And on itself, if they have decided by then; else it goes on into a gather that nobody joins."""
    start = time.monotonic()
    found = ranks(*(sending(*MOVED, timeout=LONG, after=seconds) for seconds in after[:2]), leaving(after[2]))
    assert time.monotonic() - start < 5
    assert [isinstance(error, RankDisagreement) for error in found] == [True, True, after[2] > 0]
    assert all("rank 2 compiled a graph with 1 all-gathers" in str(error) for error in found if error)
    assert all('{"wire": "off"}' in str(error) for error in found if error)
    # what came of it is forgotten
    assert ranks(*[sending(*MOVED, timeout=LONG)] * 3) == [None] * 3


def test_gathers_left_as_they_are_and_moved_by_turns(ranks):
    """Whoever is first at the next turn, or late at the last, is not taken for one that decides otherwise."""
    moved, before = sending(*MOVED, timeout=LONG), sending(*BEFORE, timeout=LONG)
    turns = [leaving(), moved, leaving(), leaving(), before]
    assert ranks(*(Turns(turns, [pause] * 5) for pause in (0, 0.3, 0.05))) == [None] * 3


def test_graphs_whose_gathers_are_left_as_they_are_are_not_compared(ranks, calls):
    """No rank joins in what another one compares: nobody knows what these have decided."""
    _, asked, _ = calls
    for sends in (MOVED, BEFORE):
        assert ranks(*[sending(*sends, timeout=LONG)] * 3) == [None] * 3
    run = checked(lambda x: x + 1, leaving().traffic, [torch.ones(1)])
    assert ranks(Calling(run)) == [2] and not asked


class Failing(Sending):
    """A rank whose passes fail."""

    def __call__(self):
        def passes(graph):
            raise KeyError

        passes.collectives = SimpleNamespace(wire="auto")  # type: ignore[attr-defined]
        with pytest.raises(PassError):
            GraphPass(passes, CacheKey(None, ""))(fx.Graph())  # type: ignore[arg-type]


@pytest.mark.parametrize("failing", [1, 3])
def test_ranks_whose_passes_fail_tell_the_others(ranks, monkeypatch, failing):
    """Their graph can run as it was, if it does on all of them."""
    traffic = sending(*MOVED).traffic
    monkeypatch.setattr("f8fx.graph_pass.traffic", lambda *_: traffic)
    found = ranks(*[Failing(traffic, LONG, 0.0)] * failing, *[sending(*MOVED, timeout=LONG)] * (3 - failing))
    if failing == 3:
        assert found == [None] * 3
    else:
        assert [type(error) for error in found] == [RankDisagreement] * 3
        assert "'as without f8fx' on rank 0" in str(found[1])


def test_what_is_sent_over_each_group_is_compared(ranks):
    both = [Traffic(of, BEFORE, MOVED) for of in ((0, 1, 2), (0, 1))]
    other = [both[0], replace(both[1], sends=BEFORE)]
    found = ranks(*(Sending(traffic, LONG, 0.0) for traffic in (both, other, both[:1])))
    assert [isinstance(error, RankDisagreement) for error in found] == [True, True, False]


def test_groups_do_not_wait_for_each_other(ranks):
    """Two pipeline stages of one rank and two: different graphs."""
    pair = sending(*MOVED, timeout=LONG, of=(0, 1))
    assert ranks(pair, pair) == [None] * 2
    assert ranks(None, None, sending(*BEFORE, of=(2,))) == [None]


@pytest.mark.parametrize("repeated", [1, 2])
def test_a_rank_that_is_slow_to_repeat_what_others_have_repeated(ranks, repeated):
    """They have decided otherwise since; nobody disagrees."""
    turns = [sending(*sends, timeout=LONG) for sends in (MOVED, *[MOVED] * repeated, BEFORE)]
    assert ranks(*(Turns(turns, [*[0] * repeated, pause, 0]) for pause in (0, 1, 0.5))) == [None] * 3


def test_who_repeats_what_another_has_repeated_waits_for_the_third(ranks):
    """Which decides otherwise, where the first has gone on."""
    first = Turns([sending(*MOVED, timeout=LONG)] * 2, [0, 0.3])
    second = Turns([sending(*sends, timeout=LONG) for sends in (MOVED, MOVED, BEFORE)], [0, 0, 0])
    third = Turns([sending(*sends, timeout=LONG) for sends in (MOVED, ("else",))], [0, 0.5])
    assert [type(error) for error in ranks(first, second, third)] == [RankDisagreement] * 3


@pytest.fixture
def compiling(store, monkeypatch, caplog):
    """One rank after the other compiles a model; what was warned of then."""
    models = {}

    def run(rank, *options, of=(0, 1, 2), weight="blocks.0.up.weight (96, 64)"):
        caplog.clear()
        monkeypatch.setattr(peers, "process_store", lambda: (store, rank))
        model = models.setdefault((rank, of, weight), Peers(of, (weight,)))
        with caplog.at_level("WARNING", "f8fx"):
            model.compare(list(options))
        return caplog.text

    return run


def test_ranks_that_compile_a_model_alike(compiling):
    for options in ("recipe=rowwise", "recipe=tensorwise"):
        for rank in (0, 2, 1):
            assert compiling(rank, options) == ""


def test_ranks_that_compile_a_model_with_different_options(compiling):
    assert compiling(0, "recipe=rowwise") == compiling(1, "recipe=rowwise") == ""
    assert "recipe=tensorwise on rank 2, recipe=rowwise on rank" in compiling(2, "recipe=tensorwise")
    assert compiling(2, "recipe=tensorwise") == ""  # said once


@pytest.mark.parametrize(("first", "later"), itertools.permutations(range(3), 2))
def test_of_two_ranks_that_compile_a_model_the_later_one_says_so(compiling, first, later):
    assert compiling(first, "recipe=rowwise") == ""
    assert f"recipe=tensorwise on rank {later}, recipe=rowwise on rank {first}" in compiling(
        later, "recipe=tensorwise"
    )


def test_two_ranks_of_many_that_compile_a_model(compiling):
    assert compiling(4, "recipe=rowwise", of=(4, 7)) == ""
    assert "recipe=tensorwise on rank 7, recipe=rowwise on rank 4" in compiling(
        7, "recipe=tensorwise", of=(4, 7)
    )


def test_ranks_that_compile_a_model_each(compiling):
    """Of other weights, or held by other ranks."""
    compiling(0, "recipe=rowwise")
    assert compiling(1, "recipe=tensorwise", weight="head.weight (51, 96)") == ""
    assert compiling(1, "recipe=tensorwise", of=(0, 1)) == ""


def test_the_options_that_differ_are_named(compiling):
    """Those of the last graph that the other rank compiled."""
    compiling(0, "pad=auto", "recipe=rowwise")
    compiling(0, "pad=auto", "recipe=tensorwise", "save=fast", "wire=off")
    text = compiling(1, "pad=auto", "recipe=rowwise", "save=lean", "wire=auto")
    assert "options: recipe=rowwise, save=lean, wire=auto on rank 1, " in text
    assert " on rank 1, recipe=tensorwise, save=fast, wire=off on rank 0. They" in text
    assert "options: none of these on rank 2, recipe=rowwise, save=lean, wire=auto on rank 1" in compiling(
        2, "pad=auto"
    )
    compiling(0, "pad=auto", of=(0, 1))
    assert "options: wire=off on rank 1, none of these on rank 0" in compiling(
        1, "pad=auto", "wire=off", of=(0, 1)
    )


def test_a_rank_that_compiles_a_model_for_itself_too(compiling):
    """A replica that is evaluated alone, with options of its own, waits for nobody."""
    compiling(0, "recipe=rowwise"), compiling(1, "recipe=rowwise")
    assert compiling(0, "weights=cached") == ""
    assert compiling(2, "recipe=rowwise") == ""


def test_options_in_words():
    """In the same words for what decides alike: of a function its name, if it does not say itself what it is."""

    def keep(fqn, gemm):
        return True

    class Keep:
        def __call__(self, fqn, gemm):
            return True

    def words(**options):
        return {
            word.partition("=")[0]: word.partition("=")[2] for word in peers._in_words(Options.parse(options))
        }

    assert words(filter_fn=keep)["filter_fn"] == repr(keep.__qualname__)
    keep.uuid = "v1"
    assert words(filter_fn=keep)["filter_fn"] == "'v1'"
    assert words(filter_fn=Keep())["filter_fn"] == "'Keep'"
    assert "filter_fn" not in words()
    for names in ("filter_fqns", "only_fqns"):
        assert words(**{names: ["b", "a"]}) == words(**{names: {"a", "b"}}) == words(**{names: ["a", "b"]})
    assert words(recipe="rowwise")["recipe"] == "'rowwise'"
    mine = dataclasses.replace(PRESETS["rowwise"], grad_weight=None)
    assert words(recipe=mine)["recipe"] == repr(mine)
    assert words()["torch"] == repr(torch.__version__)
    assert words()["code of f8fx"] == repr(source_hash()[:12])


def test_another_recipe_than_that_of_the_gathers_is_named(caplog):
    model = Peers((), (), PRESETS["rowwise"])
    same_weights = dataclasses.replace(PRESETS["rowwise"], name="mine", grad_weight=None)
    for recipe in (PRESETS["rowwise"], same_weights):
        model.compare_recipe(recipe)
    assert caplog.text == ""
    for _ in range(2):
        model.compare_recipe(PRESETS["tensorwise"])
    (warned,) = caplog.records
    assert (
        "is compiled with recipe 'tensorwise', and its weights are gathered in the formats of 'rowwise'"
        in warned.message
    )


@pytest.mark.parametrize("gemm", ["output", "grad_input"])
def test_another_recipe_in_one_matmul_that_reads_the_weight_is_named(gemm, caplog):
    other = {gemm: getattr(PRESETS["tensorwise"], gemm)}
    Peers((), (), PRESETS["rowwise"]).compare_recipe(
        dataclasses.replace(PRESETS["rowwise"], name="mine", **other)
    )
    assert "is compiled with recipe 'mine'" in caplog.text


def test_the_models_that_a_graph_reads_weights_of_are_compared(monkeypatch, caplog):
    """By themselves, and as local parts of DTensors."""
    first, second = (Peers((0, 1), (name,), PRESETS["rowwise"]) for name in ("first", "second"))
    weight, local = (SimpleNamespace(copies=SimpleNamespace(peers=model)) for model in (first, second))
    monkeypatch.setattr(peers, "process_store", lambda: (dist.HashStore(), 0))
    options = Options.parse({"recipe": "tensorwise"})
    peers.compare([torch.ones(1), weight, SimpleNamespace(_local_tensor=local)], options)
    assert first.mine == second.mine == [peers._in_words(options)]
    assert len(caplog.records) == 2


def test_a_process_that_is_no_rank_of_a_model_is_compared_with_nobody(monkeypatch):
    """Its process group may be gone."""
    for found in (None, ("no store", 3)):
        monkeypatch.setattr(peers, "process_store", lambda found=found: found)
        Peers((0, 1, 2), ("weight (96, 64)",)).compare(["recipe=rowwise"])


def test_a_model_of_one_rank_is_compared_with_nobody(monkeypatch):
    for alone in ((), (0,)):
        monkeypatch.setattr(peers, "process_store", lambda: ("no store", 0))
        Peers(alone, ("weight (96, 64)",)).compare(["recipe=rowwise"])
