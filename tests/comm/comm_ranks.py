"""What the ranks of the collectives' tests run. Each check returns what it found wrong, one line for each fault."""

import hashlib
import random
import threading
import time

import comm_oracle as oracle
import torch

from tokenweave.comm import Collective, Group

EPS = 1e-5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 2, 3, 5, 13, 33, 577)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same numbers on every rank, on the default device, as all tensors here."""
    device = torch.get_default_device()
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


def inputs(group: Group, tokens: int, hidden: int, dtype: torch.dtype, wide: bool):
    partials = list(draw(tokens, group.size, tokens, hidden, dtype=dtype))
    residual = draw(tokens + 1, tokens, hidden, dtype=dtype)
    weight = draw(tokens + 2, hidden, dtype=torch.float32 if wide else dtype)
    return partials, residual, weight


def same(
    what: str, found: torch.Tensor, wanted: torch.Tensor, relative: float = 0.0, absolute: float = 0.0
) -> list[str]:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return [f"{what}: {found.shape} {found.dtype} where {wanted.shape} {wanted.dtype} is right"]
    absolute = absolute or relative * 1e-2
    if not torch.isclose(found.double(), wanted.double(), rtol=relative, atol=absolute, equal_nan=True).all():
        return [f"{what}: off by {(found.double() - wanted.double()).abs().max().item()}"]
    alike = int(torch.isclose(found, wanted, rtol=0, atol=0, equal_nan=True).sum())
    if found.dtype != torch.float32 and alike < 0.99 * found.numel():
        return [f"{what}: rounded otherwise in more than 1 % of its elements"]
    return []


def digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(
        b"".join(t.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes() for t in tensors)
    ).hexdigest()


def fused(group: Group, hidden: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[list[str], str]:
    """Both lanes, from the buffer and from private memory, both types of weight. Also a digest of all bits."""
    wrong, bits = [], []
    with group.open_collective(hidden, max(sizes), dtype, lanes=2) as collective:
        for tokens in sizes:
            mine = group.rows(tokens)
            for lane, wide in ((0, True), (1, False)):
                partials, residual, weight = inputs(group, tokens, hidden, dtype, wide)
                want_residual, want = oracle.fused(partials, residual, weight, EPS)
                buffer = collective.buffer(lane, tokens)
                for private in (False, True):
                    what = f"[{tokens}, {hidden}] {dtype} lane {lane} {'private' if private else 'buffer'}"
                    buffer.fill_(float("nan"))
                    partial = partials[group.rank].clone() if private else buffer.copy_(partials[group.rank])
                    rows = residual[mine].clone()
                    x = collective.all_reduce_add_rms_norm(partial, rows, weight, EPS, lane=lane)
                    wrong += same(f"residual {what}", rows, want_residual[mine])
                    wrong += same(f"normed {what}", x, want, oracle.tolerance(dtype))
                    if tokens and x.data_ptr() != buffer.data_ptr():
                        wrong.append(f"{what}: not returned in the lane's buffer")
                    bits.append(digest(x))
    return wrong, digest(*(torch.tensor(list(b.encode())) for b in bits))


def any_cut(group: Group) -> list[str]:
    """However rows are cut into calls, and so whichever rank owns a row, its bits are the same."""
    wrong = []
    for hidden, dtype in ((577, torch.float32), (96, torch.bfloat16)):
        tokens = 41
        partials, residual, weight = inputs(group, tokens, hidden, dtype, True)
        with group.open_collective(hidden, tokens, dtype, lanes=2) as collective:
            rows = residual[group.rows(tokens)].clone()
            whole = collective.all_reduce_add_rms_norm(partials[group.rank], rows, weight, EPS).clone()
            for cuts in ((0, 1, 2, 3, 5, 41), (0, 17, 41), (0, 40, 41), tuple(range(42))):
                parts = []
                for number, (start, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
                    part = partials[group.rank][start:end].clone()
                    rows = residual[start:end][group.rows(end - start)].clone()
                    parts.append(collective.all_reduce_add_rms_norm(part, rows, weight, EPS, lane=number % 2).clone())
                if not torch.equal(torch.cat(parts), whole):
                    wrong.append(f"{dtype} cut at {cuts}: other bits")
    return wrong


def not_finite(group: Group) -> list[str]:
    """NaN and infinity stay in their rows and go through as arithmetic says."""
    wrong = []
    for dtype in DTYPES:
        partials, residual, weight = inputs(group, 13, 80, dtype, True)
        partials[-1][2, 5], partials[0][7, 79], residual[11, 64] = float("nan"), float("inf"), -float("inf")
        want_residual, want = oracle.fused(partials, residual, weight, EPS)
        with group.open_collective(80, 13, dtype) as collective:
            rows = residual[group.rows(13)].clone()
            x = collective.all_reduce_add_rms_norm(partials[group.rank], rows, weight, EPS)
            wrong += same(f"residual {dtype}", rows, want_residual[group.rows(13)])
            wrong += same(f"normed {dtype}", x, want, oracle.tolerance(dtype))
            if int(torch.isnan(x).any(-1).sum()) != 3:
                wrong.append(f"{dtype}: not three rows have NaN")
            for partial in partials:
                partial[4] = 0
            residual[4] = 0  # a row of zeros and no epsilon: 0 / 0 on its owner, and no error between two barriers
            rows = residual[group.rows(13)].clone()
            x = collective.all_reduce_add_rms_norm(partials[group.rank], rows, weight, 0.0)
            if not torch.isnan(x[4]).all() or torch.isnan(x[5]).any():
                wrong.append(f"{dtype}: a row of zeros without an epsilon is {x[4]}")
    return wrong


def layers(group: Group) -> list[str]:
    """Residuals stay with their owners over several layers, each reading the rows of the one before."""
    wrong = []
    hidden, weight = 64, draw(9, 64)
    with group.open_collective(hidden, 1024) as collective:
        for tokens in (0, *range(1, 17), 1024):
            want_residual, want = torch.zeros(tokens, hidden), draw(tokens, tokens, hidden)
            residual, x = torch.zeros(tokens, hidden)[group.rows(tokens)].clone(), want.clone()
            for _ in range(4):
                want_residual, want = oracle.fused(
                    [want * (r + 1) for r in range(group.size)], want_residual, weight, EPS
                )
                buffer = collective.buffer(0, tokens)
                torch.mul(x, group.rank + 1, out=buffer)
                x = collective.all_reduce_add_rms_norm(buffer, residual, weight, EPS)
            wrong += same(f"residual {tokens}", residual, want_residual[group.rows(tokens)], 1e-4, 1e-3)
            wrong += same(f"normed {tokens}", x, want, 1e-4, 1e-3)
    return wrong


def separate_operations(group: Group) -> list[str]:
    """all_reduce, reduce_scatter and all_gather, into poisoned memory."""
    wrong = []
    for hidden, dtype in ((64, torch.float32), (577, torch.bfloat16), (33, torch.float16)):
        with group.open_collective(hidden, 577, dtype, lanes=2) as collective:
            for tokens in SIZES:
                what = f"[{tokens}, {hidden}] {dtype}"
                partials = list(draw(tokens, group.size, tokens, hidden, dtype=dtype))
                want, mine = oracle.total(partials).to(dtype), group.rows(tokens)
                buffer = collective.buffer(1, tokens)
                for private in (True, False):
                    buffer.fill_(float("nan"))
                    partial = partials[group.rank] if private else buffer.copy_(partials[group.rank])
                    wrong += same(f"all_reduce {what}", collective.all_reduce(partial, lane=1), want)
                    partial = partials[group.rank] if private else buffer.copy_(partials[group.rank])
                    wrong += same(f"reduce_scatter {what}", collective.reduce_scatter(partial, lane=1), want[mine])
                buffer.fill_(float("nan"))
                gathered = collective.all_gather(want[mine].clone(), tokens, lane=1)
                wrong += same(f"all_gather {what}", gathered, want)
    return wrong


def gather_and_broadcast(group: Group) -> list[str]:
    """Any shape and dtype, larger than the memory between the ranks too; the lane's buffer stays as it is."""
    wrong = []
    with group.open_collective(8, 4) as collective:
        collective.buffer(0, 4).fill_(7.0)
        for count, dtype in ((0, torch.float32), (1, torch.float32), (5, torch.bfloat16), (700, torch.float32)):
            for width in (0, 1, 33, 577, 70_000 if count == 1 else 2):
                widths = [width + 3 * rank for rank in range(group.size)]
                wanted = draw(count, count, sum(widths), dtype=dtype)
                found = collective.gather(wanted.split(widths, dim=1)[group.rank], widths)
                if group.rank:
                    wrong += [] if found is None else ["gather gave something to another rank"]
                else:
                    wrong += same(f"gather {count} x {widths}", found, wanted)
        for root in range(group.size):
            for wanted in (
                torch.tensor(5), torch.arange(7), torch.zeros(0), torch.tensor([True, False]), draw(1, 3, 577),
                draw(2, 200_000), draw(3, 6, 4).t(), draw(4, 33, dtype=torch.bfloat16), torch.ones(3).double(),
            ):  # fmt: skip
                tensor = wanted.clone() if group.rank == root else torch.zeros_like(wanted)
                found = collective.broadcast(tensor, root)
                wrong += same(f"broadcast {wanted.shape}", found, wanted)
                if found is not tensor:
                    wrong.append("broadcast is not in place")
        wrong += same("buffer", collective.buffer(0, 4), torch.full((4, 8), 7.0))
    return wrong


def refused(group: Group) -> list[str]:
    """What cannot be is refused on every rank alike, and the collective goes on."""
    wrong = []
    ones = torch.ones(64)
    with group.open_collective(64, 8, lanes=2) as c:
        own = len(range(8)[group.rows(8)])
        rows = torch.zeros(own, 64)
        attempts = {
            "max_tokens": lambda: c.buffer(0, 9),
            "not negative": lambda: c.buffer(0, -1),
            "lane 2": lambda: c.buffer(2, 1),
            "lane -1": lambda: c.all_reduce(torch.zeros(1, 64), lane=-1),
            "too many rows": lambda: c.all_reduce_add_rms_norm(torch.zeros(9, 64), rows, ones, EPS),
            "too many to reduce": lambda: c.all_reduce(torch.zeros(9, 64)),
            "too many to scatter": lambda: c.reduce_scatter(torch.zeros(9, 64)),
            "too many to gather": lambda: c.all_gather(rows, 9),
            "transposed": lambda: c.all_reduce_add_rms_norm(torch.zeros(64, 8), rows, ones, EPS),
            "one dimension": lambda: c.all_reduce_add_rms_norm(torch.zeros(64), rows, ones, EPS),
            "no dimension": lambda: c.all_reduce_add_rms_norm(torch.tensor(1.0), rows, ones, EPS),
            "dtype": lambda: c.all_reduce_add_rms_norm(torch.zeros(8, 64).half(), rows, ones, EPS),
            "strides": lambda: c.all_reduce_add_rms_norm(torch.zeros(64, 8).t(), rows, ones, EPS),
            "residual rows": lambda: c.all_reduce_add_rms_norm(torch.zeros(8, 64), torch.zeros(own + 1, 64), ones, EPS),
            "residual dtype": lambda: c.all_reduce_add_rms_norm(torch.zeros(8, 64), rows.bfloat16(), ones, EPS),
            "residual strides": lambda: c.all_reduce_add_rms_norm(
                torch.zeros(8, 64), torch.zeros(own, 128)[:, ::2], ones, EPS
            ),
            "weight shape": lambda: c.all_reduce_add_rms_norm(torch.zeros(8, 64), rows, torch.ones(63), EPS),
            "weight dtype": lambda: c.all_reduce_add_rms_norm(torch.zeros(8, 64), rows, ones.double(), EPS),
            "rows to gather": lambda: c.all_gather(torch.zeros(own + 1, 64), 8),
            "widths": lambda: c.gather(torch.zeros(2, 3), [3] * (group.size + 1)),
            "columns": lambda: c.gather(torch.zeros(2, 4), [3] * group.size),
            "root": lambda: c.broadcast(torch.zeros(2), root=group.size),
        }  # fmt: skip
        for what, attempt in attempts.items():
            try:
                attempt()
                wrong.append(f"{what}: not refused")
            except ValueError:
                pass
        for tokens in (7, 8):
            x = c.all_reduce(torch.ones(tokens, 64))
            wrong += same(f"after refusals {tokens}", x, torch.full((tokens, 64), float(group.size)))
    for arguments in ({"hidden_size": 0}, {"max_tokens": 0}, {"lanes": 3}, {"dtype": torch.float64}, {"timeout": 0}):
        try:
            group.open_collective(**{"hidden_size": 8, "max_tokens": 8, **arguments})
            wrong.append(f"{arguments}: not refused")
        except ValueError:
            pass
    try:
        c.barrier()
        wrong.append("closed collective: not refused")
    except RuntimeError as error:
        wrong += [] if "closed" in str(error) else [str(error)]
    return wrong


def two_lanes(group: Group) -> list[str]:
    """A thread for each lane, with sleeps of unlike length on every rank: lanes never wait for each other."""
    wrong: list[str] = []
    hidden, tokens = 64, 5
    weight = torch.ones(hidden)

    def run(collective: Collective, lane: int) -> None:
        pauses = random.Random(10 * group.rank + lane)
        for round_ in range(100):
            partials = [draw(1000 * lane + round_ + r, tokens, hidden) for r in range(group.size)]
            residual = draw(round_, tokens, hidden)
            rows = residual[group.rows(tokens)].clone()
            time.sleep(pauses.choice((0.0, 0.0, 0.0005, 0.002)))
            x = collective.all_reduce_add_rms_norm(partials[group.rank], rows, weight, EPS, lane=lane)
            wrong.extend(same(f"lane {lane} round {round_}", x, oracle.fused(partials, residual, weight, EPS)[1], 1e-6))

    with group.open_collective(hidden, tokens, lanes=2, timeout=20.0) as collective:
        threads = [threading.Thread(target=run, args=(collective, lane)) for lane in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return wrong


def copies(group: Group) -> list[int]:
    """Copies counted after a partial in the buffer, an empty one, and two private ones."""
    counts = []
    with group.open_collective(16, 4) as collective:
        for partial in (collective.buffer(0, 3), torch.zeros(0, 16), torch.zeros(3, 16), torch.zeros(2, 16)):
            collective.all_reduce(partial)
            counts.append(collective.copies)
    return counts


def all_checks(group: Group) -> dict[str, object]:
    """Everything that does not end the group, in one launch: starting ranks is what takes time."""
    found: dict[str, object] = {}
    bits = []
    wrong = []
    for hidden, sizes, dtypes in (
        (64, SIZES, DTYPES), (577, SIZES, DTYPES[:1]), (577, SIZES[:-1], DTYPES[1:]), (4096, (1, 3, 33), DTYPES[:2]),
    ):  # fmt: skip
        for dtype in dtypes:
            faults, hashed = fused(group, hidden, dtype, sizes)
            wrong += faults
            bits.append(hashed)
    found["fused"], found["bits"] = wrong, bits
    for check in (any_cut, not_finite, layers, separate_operations, gather_and_broadcast, refused, two_lanes, copies):
        found[check.__name__] = check(group)
    return found
