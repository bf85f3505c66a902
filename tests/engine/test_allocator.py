import subprocess
import sys

COUNT_FAULTS = """
import resource, torch
from tokenweave.engine.allocator import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        a, b = torch.ones(2_000_000), torch.ones(2_000_000)
        del a, b
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
before = faults()
keep_freed_memory()
faults()
print(before, faults())
"""


def test_repeated_allocations_cost_no_page_faults() -> None:
    out = subprocess.run([sys.executable, "-c", COUNT_FAULTS], capture_output=True, text=True, check=True).stdout
    before, after = map(int, out.split())
    assert before > 10_000 and after < 100
