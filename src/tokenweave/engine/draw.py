"""Drawing tokens from logits: by inversion of the cumulated probability, within top-k and top-p.

Every result depends on its own row and random numbers only, not on what else is drawn. Which of equal logits counts as
the more likely is left open.
"""

import torch

# Shapes: S rows, V vocabulary, N blocks of B columns, K candidates.
BLOCK = 256
ROUNDS = 8  # of drawing until a token falls into top_p; at 0.5 one row in 256 is left over, at 0.95 none
CANDIDATES = (64, 1024)  # topk takes 0.08 and 0.4 ms a row of 49152, a sort of all 3 ms
NUMBERS = ROUNDS + 1  # random numbers that a row may need


def draw(scaled: torch.Tensor, uniform: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """int64 [S]: a token of each row, among the top_k most likely (0: all) and of these the fewest that reach top_p.

    scaled: float32 [S, V], logits over temperature, the largest 0. uniform: float64 [S, NUMBERS] in [0, 1).
    top_k: int64 [S]. top_p: float64 [S] in (0, 1].
    """
    top_k = torch.where(top_k >= scaled.shape[1], 0, top_k)
    picked = torch.empty(len(scaled), dtype=torch.int64, device=scaled.device)
    todo = top_k > 0
    free = (~todo).nonzero().squeeze(1)
    if len(free):
        picked[free], found = _draw_within_mass(scaled[free], uniform[free], top_p[free])
        todo[free[~found]] = True
    for candidates in (*CANDIDATES, scaled.shape[1]):
        enough = torch.where(top_k > 0, top_k <= candidates, candidates > CANDIDATES[0])
        rows = (todo & enough).nonzero().squeeze(1)
        if len(rows):
            values, ids = _ranked(scaled[rows], candidates)
            total = scaled[rows].exp().sum(-1, keepdim=True, dtype=torch.float64)
            picked[rows], found = _pick(
                values, ids, uniform[rows, -1:], top_k=top_k[rows, None], top_p=top_p[rows, None], total=total
            )
            todo[rows[found]] = False
    return picked


def _draw_within_mass(
    scaled: torch.Tensor, uniform: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from the whole distribution until the token is one of top_p: exact, and without sorting. Tokens [S], and
    which rows got one in ROUNDS."""
    weights = _weights(scaled)
    picked = torch.zeros(len(scaled), dtype=torch.int64, device=scaled.device)
    found = torch.zeros(len(scaled), dtype=torch.bool, device=scaled.device)
    for attempt in range(ROUNDS):
        rows = (~found).nonzero().squeeze(1)
        if not len(rows):
            break
        mine = weights if attempt == 0 else weights[rows]
        tokens = _invert(mine, uniform[rows, attempt])
        picked[rows] = tokens
        limited = top_p[rows] < 1
        found[rows] = ~limited | (_mass_before(mine, tokens) < top_p[rows] * _mass(mine)) if limited.any() else True
    return picked, found


def _weights(scaled: torch.Tensor) -> torch.Tensor:
    """exp(scaled) as float32 [S, N, B], zeros behind the last column."""
    rows, width = scaled.shape
    blocks = -(-width // BLOCK)
    weights = scaled.new_zeros(rows, blocks * BLOCK)
    torch.exp(scaled, out=weights[:, :width])
    return weights.view(rows, blocks, BLOCK)


def _mass(weights: torch.Tensor) -> torch.Tensor:
    """float64 [S]. float32 within a block, float64 over blocks: half the time of float64 throughout."""
    return weights.sum(-1).sum(-1, dtype=torch.float64)


def _mass_before(weights: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """float64 [S]: the mass of all tokens that rank before `tokens`."""
    flat = weights.flatten(1)
    own = flat.gather(1, tokens.unsqueeze(1))
    equal = (flat == own) & (torch.arange(flat.shape[1], device=flat.device) < tokens.unsqueeze(1))
    before = (flat > own) | equal
    return _mass((flat * before).view_as(weights))


def _invert(weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulated mass passes `points` of the whole: first the block, then the column in it.
    Never one of weight 0."""
    sums = weights.sum(-1).to(torch.float64).cumsum(-1)
    target = points.unsqueeze(1) * sums[:, -1:]
    block = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)
    start = torch.where(block > 0, sums.gather(1, (block - 1).clamp_(min=0)), 0)
    part = ((target - start) / (sums.gather(1, block) - start)).clamp_(0, 1 - 2.0**-53)
    inner = weights[torch.arange(len(weights), device=weights.device), block.squeeze(1)].to(torch.float64).cumsum(-1)
    column = torch.searchsorted(inner, part * inner[:, -1:], right=True).clamp_(max=BLOCK - 1)
    return (block * BLOCK + column).squeeze(1)


def _ranked(scaled: torch.Tensor, candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely tokens, [S, candidates or fewer]: their logits, falling, and ids."""
    if candidates < scaled.shape[1]:
        return scaled.topk(candidates)
    return scaled.sort(descending=True, stable=True)


def _pick(
    values: torch.Tensor,
    ids: torch.Tensor,
    points: torch.Tensor,
    *,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    total: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """From ranked candidates, [S, K]: token ids [S], and whether the K were enough to tell. points, top_k, top_p and
    total, the mass of all V tokens: [S, 1]."""
    candidates = values.shape[1]
    outside = (torch.arange(candidates, device=values.device) >= top_k) & (top_k > 0)
    weights = values.exp().to(torch.float64).masked_fill(outside, 0)
    mass = weights.cumsum(-1)
    limit = top_p * torch.where(top_k > 0, mass[:, -1:], total)
    kept = (mass - weights < limit) & ~outside  # a token stays while those before it do not reach top_p
    kept[:, 0] = True
    last = kept.sum(-1, keepdim=True) - 1
    picked = torch.searchsorted(mass, points * mass.gather(1, last), right=True)
    found = (top_k > 0) | (mass[:, -1:] >= limit)
    return ids.gather(1, torch.minimum(picked, last)).squeeze(1), found.squeeze(1)
