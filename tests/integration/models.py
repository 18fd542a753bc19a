"""Tiny random models of real architectures from ``transformers``, each with a batch to train on.

Nothing is downloaded. Some sizes are no multiple of 16 (ViT's three images and ten classes, SAM's
mask tokens, T5's vocabulary), so padding is part of every test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One architecture.

    Attributes:
        build: a fresh random model, float32.
        batch: its keyword arguments for one training step, from a generator.
        loss: the float32 scalar to train on, from what the model returns and its batch.
        linears: how many ``Linear`` and ``Conv1D`` modules it calls.
        batched: matmuls of two activations in forward and backward, by module: these stay as they are.
        without: roles of a module's three matmuls that its graph does not hold.
        filtered: matmuls to leave out with ``filter_fqns``, by module, with their roles.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Any, Batch], torch.Tensor]
    linears: int
    batched: dict[str, tuple[int, int]] = field(default_factory=dict)
    without: Callable[[str], tuple[str, ...]] = lambda name: ()
    filtered: dict[str, tuple[str, ...]] = field(default_factory=dict)


def _tokens(generator: torch.Generator, *size: int, vocab: int = 96) -> torch.Tensor:
    return torch.randint(0, vocab, size, generator=generator)


def _own_loss(output: Any, batch: Batch) -> torch.Tensor:
    return output.loss


def _classification_loss(targets: str) -> Callable[[Any, Batch], torch.Tensor]:
    """Cross-entropy in float32, of logits against a tensor of the batch."""

    def loss(output: Any, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(output.logits.float().flatten(0, -2), batch[targets].flatten())

    return loss


# -- Llama ----------------------------------------------------------------------------------------


def llama_config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        **{
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "use_cache": False,
            "pad_token_id": 0,
            **changes,
        }
    )


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(llama_config(**changes))


def llama_batch(generator: torch.Generator, batch: int = 2, length: int = 16) -> Batch:
    tokens = _tokens(generator, batch, length)
    return {"input_ids": tokens, "labels": tokens}


LLAMA = Case(llama, llama_batch, _own_loss, linears=2 * 7 + 1)


def lora_llama() -> nn.Module:
    """Low-rank adapters on two projections; all base weights are frozen."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = get_peft_model(llama(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero by default, so that the first step would train nothing else
            nn.init.normal_(parameter, std=0.05)
    return model


def _frozen(name: str) -> tuple[str, ...]:
    first = ".layers.0.self_attn." in name and not name.endswith((".o_proj", ".lora_B.default"))
    trained = ".lora_" in name
    # the embedding is frozen too: nothing below the first layer wants a gradient
    return ("grad_input",) * first + ("grad_weight",) * (not trained)


LORA = Case(lora_llama, llama_batch, _own_loss, linears=2 * (7 + 4) + 1, without=_frozen)


# -- GPT-2, BERT, T5 ------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=96, n_positions=32, n_embd=32, n_layer=1, n_head=4, use_cache=False,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def token_batch(generator: torch.Generator) -> Batch:
    return {"input_ids": _tokens(generator, 2, 16)}


GPT2 = Case(gpt2, token_batch, _classification_loss("input_ids"), linears=4 + 1)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


def bert_batch(generator: torch.Generator) -> Batch:
    tokens = _tokens(generator, 2, 16)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 12:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


BERT = Case(bert, bert_batch, _classification_loss("input_ids"), linears=6 + 2)


def t5() -> nn.Module:
    """The output projection is the embedding: one weight, gathered from and multiplied with."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_decoder_layers=1, num_heads=4,
        dropout_rate=0.0, tie_word_embeddings=True, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def t5_batch(generator: torch.Generator) -> Batch:
    return {"input_ids": _tokens(generator, 2, 16), "decoder_input_ids": _tokens(generator, 2, 8)}


T5 = Case(
    t5,
    t5_batch,
    _classification_loss("decoder_input_ids"),
    linears=6 + 10 + 1,
    # self-attention adds a trained position bias to its scores, hence no fused kernel
    batched={f"{half}.block.0.layer.0.SelfAttention": (2, 4) for half in ("encoder", "decoder")},
)


# -- vision ---------------------------------------------------------------------------------------


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, image_size=16,
        patch_size=4, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config)


def vit_batch(generator: torch.Generator) -> Batch:
    pixels = torch.randn(3, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels}


def _vit_loss(output: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(output.logits.float(), torch.tensor([1, 4, 9], device=output.logits.device))


VIT = Case(vit, vit_batch, _vit_loss, linears=6 + 1)


def sam() -> nn.Module:
    """Segment Anything, all three parts; windowed and global attention with relative positions."""
    from transformers import SamConfig, SamModel
    from transformers.models.sam.configuration_sam import (
        SamMaskDecoderConfig,
        SamPromptEncoderConfig,
        SamVisionConfig,
    )

    vision = SamVisionConfig(
        hidden_size=32, output_channels=32, num_hidden_layers=2, num_attention_heads=4, image_size=64,
        patch_size=16, mlp_dim=64, window_size=3, global_attn_indexes=[1], num_pos_feats=16,
    )  # fmt: skip
    prompt = SamPromptEncoderConfig(hidden_size=32, image_size=64, patch_size=16, mask_input_channels=4)
    decoder = SamMaskDecoderConfig(
        hidden_size=32, mlp_dim=64, num_hidden_layers=2, num_attention_heads=4, iou_head_hidden_dim=32
    )
    model = SamModel(
        SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder)
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:  # SAM starts its weights at 1e-10, which leaves no gradient to look at
            nn.init.normal_(parameter, std=0.1)
    return model


def sam_batch(generator: torch.Generator) -> Batch:
    return {
        "pixel_values": torch.randn(1, 3, 64, 64, generator=generator),
        "input_points": torch.rand(1, 1, 2, 2, generator=generator) * 64,
        "input_labels": torch.ones(1, 1, 2, dtype=torch.long),
    }


def _sam_loss(output: Any, batch: Batch) -> torch.Tensor:
    masks, scores = output.pred_masks.float(), output.iou_scores.float()
    return (masks - 0.5).square().mean() + (scores - 0.5).square().mean()


_SAM_ATTENTION = {f"vision_encoder.layers.{i}.attn": (4, 8) for i in (0, 1)}
SAM = Case(
    sam,
    sam_batch,
    _sam_loss,
    linears=2 * 4 + 2 * (3 * 4 + 2) + 4 + 5 * 3,
    # masks are a product of two activations: the upscaled image and what the hypernetworks made
    batched={**_SAM_ATTENTION, "mask_decoder": (1, 2)},
    # random Fourier features: sine and cosine of a matmul's result, which no float8 is precise enough for
    filtered={
        "shared_image_embedding": ("output", "grad_weight"),
        "prompt_encoder.shared_embedding": ("output", "grad_weight"),
    },
)

CASES = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "bert": BERT,
    "vit": VIT,
    "sam": SAM,
    "t5": T5,
    "lora": LORA,
}
