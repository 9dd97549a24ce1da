"""Checkpoints made for tests."""

import math
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, vocab_size: int = 320) -> None:
    """A byte-level BPE tokenizer with chat markers, trained on this file's own text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(Path(__file__).read_text().splitlines(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def write_tiny(folder: Path, seed: int = 0) -> Path:
    """A seeded Llama checkpoint with shapes that are no powers of two, its tokenizer beside it."""
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)
    return folder


def _factors(count: int, generator: torch.Generator) -> torch.Tensor:
    """Log-uniform in [1/2, 2]."""
    return torch.exp((torch.rand(count, generator=generator) * 2 - 1) * math.log(2.0))


@torch.no_grad()
def write_offgrid(checkpoint: Path, folder: Path) -> Path:
    """A Llama checkpoint with the same function whose weights lie on no quantization grid.

    Norm weights are folded into the linears that follow, and random factors move from up_proj to
    down_proj and from v_proj to o_proj.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    config, generator = model.config, torch.Generator().manual_seed(1234)
    repeats = config.num_attention_heads // config.num_key_value_heads
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, linears in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            for linear in linears:
                linear.weight.mul_(norm.weight)
            norm.weight.fill_(1.0)
        scale = _factors(attention.v_proj.out_features, generator)
        attention.v_proj.weight.mul_(scale[:, None])
        heads = scale.view(config.num_key_value_heads, config.head_dim).repeat_interleave(repeats, 0)
        attention.o_proj.weight.div_(heads.reshape(1, -1))
        scale = _factors(mlp.up_proj.out_features, generator)
        mlp.up_proj.weight.mul_(scale[:, None])
        mlp.down_proj.weight.div_(scale)
    model.half().save_pretrained(folder)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)
    return folder
