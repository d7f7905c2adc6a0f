"""Write the initialized model directory that the warm start trains: stock Qwen2, seeded.

    python examples/deep_world/init_model.py --out runs/deep_world/init

writes config.json, generation_config.json, model.safetensors and the tokenizer files. The
initialization is the one of tiny_world, whose file explains it.
"""

import argparse
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch
from tokenizer import END_OF_TURN, build_tokenizer
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

TINY_WORLD = Path(__file__).resolve().parents[1] / "tiny_world"
HIDDEN, LAYERS, HEADS, FFN = 160, 4, 5, 320
PREVIOUS_TOKEN_HEADS = 2


def tiny_init_model() -> ModuleType:
    """Load the file of the same name in tiny_world."""
    spec = spec_from_file_location("tiny_world_init_model", TINY_WORLD / "init_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_config(vocab_size: int, pad_id: int, eos_id: int) -> Qwen2Config:
    """Configuration with stock keys only; the vocabulary has no unused ids."""
    return Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        pad_token_id=pad_id,
        bos_token_id=None,
        eos_token_id=eos_id,
        dtype="float32",
    )


def main() -> None:
    """Parse the command line and write the model directory."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    arguments = parser.parse_args()
    tokenizer = build_tokenizer()
    eos_id = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    torch.manual_seed(arguments.seed)
    model = Qwen2ForCausalLM(make_config(len(tokenizer), tokenizer.pad_token_id, eos_id))
    tiny_init_model().initialize(model, PREVIOUS_TOKEN_HEADS)
    model.generation_config = GenerationConfig(
        eos_token_id=eos_id, pad_token_id=tokenizer.pad_token_id
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
