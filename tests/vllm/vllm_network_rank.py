"""One rank of vllm_network.py: three engines of vLLM in one process, on a host of its own as the network sees it."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from tokenweave.integrations.vllm.benchmark import engine, prepare, write_shape

ENGINES = {"vLLM": "off", "fused": "fused", "weave": "weave"}


def main() -> None:
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    os.sched_setaffinity(0, {settings["core"]})
    os.environ.update(
        LOCAL_RANK="0", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_HOST_IP="127.0.0.1"
    )

    def answer(value: object) -> None:
        print(json.dumps(value), file=answers, flush=True)

    answer("here")
    engines = {}
    with tempfile.TemporaryDirectory() as directory:
        for line in sys.stdin:
            question = json.loads(line)
            if question == "go":
                if settings["without_shared_memory"]:
                    _talk_over_the_network()
                where = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
                prepare(where, int(os.environ["RANK"]))  # before an engine is made with the plugin off
                write_shape(Path(directory), settings["layers"])
                for name, mode in ENGINES.items():
                    engines[name] = engine(
                        directory,
                        2,
                        mode=mode,
                        dtype=settings["dtype"],
                        compiled=False,
                        max_tokens=settings["tokens"] + 16,
                    )
                answer("loaded")
                continue
            import torch.distributed as dist

            prompt = [{"prompt_token_ids": [(question["turn"] * 31 + 7 * i) % 8192 for i in range(question["tokens"])]}]
            dist.barrier()
            began = time.perf_counter()
            engines[question["engine"]](prompt)
            answer(time.perf_counter() - began)


def _talk_over_the_network() -> None:
    """vLLM 0.32 takes ranks for neighbours that share memory if their meeting points have the same name, which is so on
    all hosts (VLLM_DIST_IDENT: the port). Here they would share memory, on hosts they would fail to: have it see that
    they do not, which leads to its own torch.distributed path."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


if __name__ == "__main__":
    main()
