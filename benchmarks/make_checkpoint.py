"""Write a made-up Llama checkpoint of any size, random bfloat16 weights in shards: what time and memory is
measured on.

    python benchmarks/make_checkpoint.py OUT --tokenizer FOLDER                  # 8 billion parameters, 16 GB
    python benchmarks/make_checkpoint.py OUT --tokenizer FOLDER --layers 4 --vocab 49152

The defaults are Llama 3 8B's shape. It says nothing sensible, but costs what a real model of its shape costs.
Memory holds one tensor.
"""

import argparse
import json
import math
import shutil
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig

from qtool.core.checkpoint import COMPANIONS
from qtool.core.files import new_folder
from qtool.quantize.writing import LazyTensor, write_weights

HEAD_DIM = 128


def shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every stored tensor, by full name."""
    hidden, intermediate, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    heads, kv_heads = config.num_attention_heads * HEAD_DIM, config.num_key_value_heads * HEAD_DIM
    of_layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config.num_hidden_layers):
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    """Norms of one, and matrices [N, K] that keep the size of what they multiply."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 1 / math.sqrt(shape[1]), generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a checkpoint folder to take it from")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096, help=f"a multiple of {HEAD_DIM}")
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--kv-heads", type=int, default=8, help="a divisor of hidden / 128")
    parser.add_argument("--vocab", type=int, default=128256, help="at least the tokenizer's")
    parser.add_argument("--shard-bytes", type=int, default=4_000_000_000)
    args = parser.parse_args()
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // HEAD_DIM,
        num_key_value_heads=args.kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    tensors = [
        LazyTensor(name, torch.bfloat16, shape, partial(drawn, shape, seed))
        for seed, (name, shape) in enumerate(shapes(config).items())
    ]
    with new_folder(args.output) as folder:
        write_weights(folder, tensors, args.shard_bytes)
        (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
        for name in COMPANIONS:
            if (args.tokenizer / name).is_file():
                shutil.copyfile(args.tokenizer / name, folder / name)
    print(f"{sum(math.prod(one.shape) for one in tensors) / 1e9:.2f} billion parameters")


if __name__ == "__main__":
    main()
