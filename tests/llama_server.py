"""A real llama.cpp server with a tiny model of random weights, made here: it listens within a second."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.ports import free_port
from tests.waiting import WAIT_S

LAYERS, WIDTH, HEADS, FEED_FORWARD = 2, 64, 4, 128
CONTEXT_MAX = 65_536


def make_model(path: Path) -> None:
    """Write a Llama of two layers with a vocabulary of bytes, 470 kB."""
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


class LlamaServer:
    """`async with LlamaServer(model, slots=6, context=49_152) as server`: a process that serves until its end."""

    def __init__(self, model: Path, *, slots: int, context: int, metrics: bool = True, port: int = 0) -> None:
        """`context`: tokens of all slots together."""
        self.port = port or free_port()
        self._arguments = (str(model), str(self.port), str(slots), str(context), "metrics" if metrics else "")
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> LlamaServer:
        root = Path(__file__).parents[1]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.llama_server", *self._arguments, cwd=root,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(root)},
        )  # fmt: skip
        assert self._process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            assert await self._process.stdout.readline() == b"listening\n"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    async def kill(self) -> None:
        """End the server as a crash does."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


def main() -> None:
    import xllamacpp

    model, port, slots, context, metrics = sys.argv[1:]
    terms = xllamacpp.CommonParams()
    terms.model.path, terms.port, terms.n_parallel, terms.n_ctx = model, int(port), int(slots), int(context)
    terms.model_alias = {Path(model).stem}
    terms.endpoint_metrics, terms.endpoint_slots, terms.cpuparams.n_threads = bool(metrics), True, 1
    server = xllamacpp.Server(terms)  # it has threads of its own
    print("listening", flush=True)
    while server:
        time.sleep(3600)


if __name__ == "__main__":
    main()
