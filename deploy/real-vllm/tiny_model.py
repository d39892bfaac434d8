"""Writes a tiny Llama for vLLM into a folder: its shape and a tokenizer. vLLM makes random weights up.

    python tiny_model.py FOLDER

The tokenizer is a byte-level BPE trained here on the words below, so that each of them is one token, also
behind a space, and anything else falls apart into bytes. A length in words is then nearly a length in tokens.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = """
    able about above after again air all also always and animal another answer any are ask away back because
    been before begin below between big book both boy but call came can car change children city close come
    could country cut day did different does done door down draw each early earth eat end enough even every
    example eye face family far farm father feel feet few find first follow food for form found four from
    gave get girl give good got great group grow had hand hard has have head hear help her here high him his
    home hour house how idea into its just keep kind know land large last late learn leave left letter life
    light like line list little live long look made make man many may mean men might mile miss more most
    mother move much must name near need never new next night number off often old once one only open other
    our out over own page paper part people place plant play point put question read real right river run
    said same saw say school sea second see seem sentence set she should show side small some song soon
    sound spell stand start state still stop story study such take talk tell than that the them then there
    these they thing think this those thought three through time too took tree try turn two under until use
    very walk want was watch water way well went were what when where which while white who why will with
    word work world would write year you young
"""
WORDS = TEXT.split()

SPECIAL = ["<s>", "</s>", "<pad>"]

CHAT_TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def tokenizer() -> Tokenizer:
    """A byte-level BPE in which every word of WORDS is one token, bare and behind a space."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE["vocab_size"],
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # The trainer drops a pair it has seen once: every form goes in twice.
    bpe.train_from_iterator((prefix + word for word in WORDS * 2 for prefix in ("", " ")), trainer)
    return bpe


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    bpe = tokenizer()
    split = [word for word in WORDS if len(bpe.encode(word).ids) > 1 or len(bpe.encode(f" {word}").ids) > 1]
    if split:
        raise SystemExit(f"the vocabulary is too small for {len(split)} words, among them {split[:5]}")
    bpe.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": SHAPE["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    # Last, because setup.sh takes this file for the sign of a complete folder.
    (folder / "config.json").write_text(json.dumps(SHAPE, indent=2))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: tiny_model.py FOLDER")
    write(Path(sys.argv[1]))
