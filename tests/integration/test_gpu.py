"""The real architectures on a GPU with float8 tensor cores, through Inductor: ``pytest -m gpu``. Skipped everywhere else."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.integration import training
from tests.integration.models import CASES
from tests.test_gpu import HAVE_GPU

pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAVE_GPU, reason="no GPU with float8 tensor cores"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]

RUNS = [*((name, "tensorwise") for name in CASES), ("llama", "rowwise"), ("llama", "rowwise_with_gw_hp")]


@pytest.mark.parametrize(("name", "recipe"), RUNS)
def test_three_training_steps(name: str, recipe: str):
    """Every eligible matmul in float8, and the losses as near to bf16's as those of graphs that run eagerly on a CPU."""
    if name == "lora":
        pytest.importorskip("peft")
    reference = training.run(name, None, device="cuda")
    float8 = training.run(name, recipe, device="cuda", executor="inductor")
    print(f"\n{name}, {recipe}:  bf16 {reference.losses}  f8fx {float8.losses}")
    for losses in (reference.losses, float8.losses):
        assert losses[0] > losses[1] > losses[2]
    assert float8.losses == pytest.approx(reference.losses, abs=0.03 * reference.losses[0])
    wanted = training.expected(name)
    if recipe == "rowwise_with_gw_hp":
        wanted = Counter({key: n for key, n in wanted.items() if key[1] != "grad_weight"})
    assert Counter((d.fqn, d.role) for d in float8.decisions if d.converted) == wanted
    assert all(x.isfinite().all() for x in float8.gradients.values())
