"""A policy of images and text, trained on text: what images go through stays as it was, byte for byte.

With SOAK_ROUNDS=20, as `make soak` has it, an adapter is trained too.
"""

import os
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support import tiny
from tests.support.tables import LONG

OF_IMAGES = ("vision_tower", "multi_modal_projector")
WAYS: dict[str, tuple[str, ...]] = {"whole": ()}
if int(os.environ.get("SOAK_ROUNDS", "1")) > 1:
    WAYS["adapter"] = ("+update.lora={rank: 4, alpha: 8}",)


def make_policy(folder: Path) -> Path:
    """Gemma 3 with a vision tower, tiny and random."""
    import torch
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    torch.manual_seed(0)
    tokenizer = tiny.byte_tokenizer(("<pad>", "<eos>", "<image>"))
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": len(tokenizer), "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.2}
    context = {"max_position_embeddings": tiny.CONTEXT, "pad_token_id": 0, "eos_token_id": 1}
    config = Gemma3Config(
        text_config=size | text | context,
        vision_config=size | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=2,
        eos_token_id=1,
    )
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@LONG
@pytest.mark.parametrize("way", WAYS)
def test_two_iterations_leave_the_weights_of_images_as_they_were(slurm_ppo, models, tmp_path, way):
    policy, root, exported = make_policy(tmp_path / "policy"), tmp_path / "run", tmp_path / "exported"
    given = (f"model.policy={policy}", "update.weight_decay=0.1", *WAYS[way])
    done = slurm_ppo("run", *tiny.overrides(models, root, *given))
    assert done.returncode == 0, done.stderr
    assert slurm_ppo("export", root, exported).returncode == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (policy, exported))
    assert before.keys() == after.keys()
    same = {name for name in before if before[name].equal(after[name])}
    of_images = {name for name in before if any(part in name for part in OF_IMAGES)}
    assert len(of_images) > 30
    assert of_images <= same
    assert any(name.endswith("q_proj.weight") for name in before.keys() - same)
