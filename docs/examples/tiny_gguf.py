"""Write a tiny model of random weights in GGUF, 470 kB: `python tiny_gguf.py model.gguf`. Needs the package gguf.

A real llama.cpp serves it within a second. What it says means nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

LAYERS, WIDTH, HEADS, FEED_FORWARD = 2, 64, 4, 128
CONTEXT_MAX = 65_536


def make_model(path: Path) -> None:
    """Write a Llama of two layers with a vocabulary of bytes."""
    import gguf
    import numpy as np

    tokens = [b"<unk>", b"<s>", b"</s>", *(f"<0x{byte:02X}>".encode() for byte in range(256))]
    kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
    writer: Any = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT_MAX)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(0)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:")
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (len(tokens), WIDTH), "output_norm": (WIDTH,), "output": (len(tokens), WIDTH),
    }  # fmt: skip
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        shapes |= {f"{block}.{name}_norm": (WIDTH,) for name in ("attn", "ffn")}
        shapes |= {f"{block}.attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
        shapes |= {f"{block}.ffn_{name}": (FEED_FORWARD, WIDTH) for name in ("gate", "up")}
        shapes[f"{block}.ffn_down"] = (WIDTH, FEED_FORWARD)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", (random.standard_normal(shape) * 0.05).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
