"""Remakes the pictures of docs: python docs/pictures/remake.py [trace | plan] ...; `trace` needs root and iproute2."""

import json
import sys
import tempfile
from pathlib import Path

from tokenweave.cli.main import main

HERE = Path(__file__).parent
LINK = "1250"  # Mbit/s, at which the demo model communicates for about as long as it computes
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip


def trace(scratch: Path) -> int:
    """A prefill of the demo model on two ranks with a slow link between them, in four modes."""
    words = [
        "--prefill",
        "1024",
        "--dtype",
        "bfloat16",
        "--link",
        LINK,
        "--mode",
        "serial",
        "reordered",
        "fused",
        "weave",
    ]
    return main(["trace", *words, "--trace", str(scratch / "trace.json"), "--plot", str(HERE / "trace.png")])


def plan(scratch: Path) -> int:
    """What is predicted for Llama-3.3-70B on 8 H100s."""
    (scratch / "config.json").write_text(json.dumps(LLAMA_70B))
    words = ["--hardware", "h100", "--tp", "8", "--tokens", "256,512,1024,2048,4096"]
    return main(["plan", str(scratch), *words, "--plot", str(HERE / "plan.png")])


PICTURES = {"trace": trace, "plan": plan}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        sys.exit(max(PICTURES[name](Path(directory)) for name in sys.argv[1:] or PICTURES))
