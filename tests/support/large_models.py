"""Models of billions of weights: headers, and holes in the place of the weights."""

import json
import math
import os
import shutil
import struct
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

_BYTES = {"BF16": 2, "F32": 4, "I32": 4, "F8_E4M3": 1}


def weights_file(
    path: Path, *shapes: list[int], names: Sequence[str] = (), formats: Sequence[str] = ()
) -> None:
    """A header, which is all that is looked at, and a hole of the size that it says. In bf16 by default."""
    formats = formats or ["BF16"] * len(shapes)
    sizes = [_BYTES[kind] * math.prod(shape) for kind, shape in zip(formats, shapes, strict=True)]
    ends = list(accumulate(sizes))
    names = names or [f"t{i}" for i in range(len(shapes))]
    tensors = {
        name: {"dtype": kind, "shape": shape, "data_offsets": (end - size, end)}
        for name, kind, shape, size, end in zip(names, formats, shapes, sizes, ends, strict=True)
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + ends[-1])


def eight_billion(folder: Path, tokenizer_of: Path) -> Path:
    """The shape of Llama 3.1 8B, in bf16."""
    layers, hidden, inner, keys, vocabulary = 32, 4096, 14336, 1024, 128_256
    each = {
        "self_attn.q_proj": [hidden, hidden],
        "self_attn.k_proj": [keys, hidden],
        "self_attn.v_proj": [keys, hidden],
        "self_attn.o_proj": [hidden, hidden],
        "mlp.gate_proj": [inner, hidden],
        "mlp.up_proj": [inner, hidden],
        "mlp.down_proj": [hidden, inner],
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
    }
    tensors = {
        f"model.layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in each.items()
    }
    tensors |= {"model.embed_tokens.weight": [vocabulary, hidden], "lm_head.weight": [vocabulary, hidden]}
    tensors["model.norm.weight"] = [hidden]
    folder.mkdir()
    weights_file(folder / "model.safetensors", *tensors.values(), names=list(tensors))
    settings = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    for file in tokenizer_of.glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)
    return folder
