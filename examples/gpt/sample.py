"""Writes text with a GPT that train.py has saved.

python examples/gpt/sample.py out-gpt --start "Shoal trains" --temperature 0.8
"""

import argparse
import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file

from shoal.data.text_set import NUM_CHARACTERS, decode, encode
from shoal.models.gpt import Gpt, GptShape

SHAPE_FILE = "shape.json"


@torch.no_grad()
def generate(
    model: torch.nn.Module,
    tokens: torch.Tensor,
    num_new: int,
    block: int,
    temperature: float = 0.8,
    top_k: int = 20,
) -> torch.Tensor:
    """Appends tokens, one after another, each drawn from the `top_k` that are the most likely."""
    for _ in range(num_new):
        logits = model(tokens[:, -block:])[:, -1].float() / temperature
        best, codes = logits.topk(min(top_k, logits.shape[-1]))
        drawn = torch.multinomial(best.softmax(-1), 1)
        tokens = torch.cat([tokens, codes.gather(1, drawn)], dim=1)
    return tokens


def load(folder: Path) -> tuple[Gpt, int]:
    """The model of the newest checkpoint in a folder, and how many characters it sees at once."""
    saved = sorted(path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name))
    if not saved:
        raise SystemExit(f"{folder} has no checkpoint: train.py writes some with --out {folder}.")
    state = load_file(saved[-1] / "model.safetensors")
    (block, width), own = state["positions.weight"].shape, json.loads((folder / SHAPE_FILE).read_text())
    model = Gpt(GptShape(own["layers"], own["heads"], width, NUM_CHARACTERS, block))
    model.load_state_dict(state)
    return model.eval(), block


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="what was --out of train.py")
    parser.add_argument("--start", default="\n", help="the text to go on with")
    parser.add_argument("--num-characters", type=int, default=500)
    parser.add_argument("--temperature", type=float, default=0.8, help="above 1 bolder, below 1 safer")
    parser.add_argument("--top-k", type=int, default=20, help="draw from the K most likely characters")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model, block = load(args.folder)
    start = encode(args.start).long()[None]
    print(decode(generate(model, start, args.num_characters, block, args.temperature, args.top_k)[0]))
