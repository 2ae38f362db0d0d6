"""GroupNorm over contiguous (N, C, *space), where a group is CHANNELS * HW adjacent values.

`shared` explains what a unit is, and the ways to read one. Here a unit is a group of a sample, and
a tile has three axes: groups, channels, and places in a plane. It has R groups if they are T.held,
and one otherwise.

Forward, a tile is BLOCK adjacent values of a group, as runs of RUN values of one channel: RUN
divides HW. So weight and bias are read once per run, and only the end of a group is padded.
Backward, sums over each channel are needed, so a tile is CB channels of SB places each.
"""

import triton
import triton.language as tl

from normplug._kernels import merging
from normplug._kernels.activation import activate
from normplug._kernels.group_norm.shared import (
    gradient_before,
    load_vector,
    save_statistics,
)
from normplug._kernels.merging import ready_flag
from normplug._kernels.primitives import kernel, load_both, scalar, sum_both
from normplug._kernels.tiles import load, store
from normplug._kernels.waiting import arrive, wait


@triton.jit
def _runs(groups, inside, k, sizes, T):
    """Tile k of some groups: offsets and mask; the runs' channels, and which runs exist."""
    G, CHANNELS, HW, WIDTH = sizes
    begins = k * T.block + tl.arange(0, T.block // T.run) * T.run
    columns = begins[:, None] + tl.arange(0, T.run)[None, :]
    mask = inside[:, None, None] & (columns < WIDTH)[None, :, :]
    live = inside[:, None] & (begins < WIDTH)[None, :]
    channels = ((groups % G) * CHANNELS)[:, None] + (begins // HW)[None, :]
    if T.wide:
        groups = groups.to(tl.int64)
    return (groups * WIDTH)[:, None, None] + columns[None, :, :], mask, channels, live


@triton.jit
def _sum(values, R):
    """The sum of each of R groups."""
    if R == 1:
        return tl.sum(values) + tl.zeros([1], values.dtype)
    else:
        return tl.sum(tl.sum(values, axis=2), axis=1)


@triton.jit
def _moments(x, x_ptr, groups, inside, k, count, WIDTH, mask, T, ACC):
    """Mean of each group's tile, sum of squared distances from it (m2), and these distances."""
    if T.wide:
        groups = groups.to(tl.int64)
    # Distances from one of the values, so that a large mean costs no precision.
    first = tl.load(x_ptr + groups * WIDTH + k * T.block, mask=inside, other=0.0).to(ACC)
    d = x.to(ACC) - first[:, None, None]
    d = d if T.even else tl.where(mask, d, 0.0)
    mean = _sum(d, T.r) / count
    d -= mean[:, None, None]
    d = d if T.even else tl.where(mask, d, 0.0)
    return first + mean, _sum(d * d, T.r), d


@triton.jit
def _normalise(d, y_ptr, vectors, runs, rstd, T, F):
    """Write y from d, the distances from the mean. runs: from `_runs`."""
    weight_ptr, bias_ptr, root = vectors
    offsets, mask, channels, live = runs
    scale = load_vector(weight_ptr, channels, live, 1.0, F.acc, F.weight)
    scale *= (rstd * scalar(root, F.acc))[:, None]
    z = d * scale[:, :, None]
    if F.bias:
        z += load_vector(bias_ptr, channels, live, 0.0, F.acc, F.bias)[:, :, None]
    # Tiles that are read twice should stay in the caches, so results are evicted first. If tiles
    # are held, that is slower, as LayerNorm's rows have shown.
    y = activate(z, F.activation)
    store(y_ptr, offsets, y, mask, T.even, LAST=not T.held)


@kernel
def group_norm_planes_forward(
    x_ptr, weight_ptr, bias_ptr, y_ptr, stats_ptr, partial_ptr, counters_ptr,
    N, G, CHANNELS, HW, WIDTH_UNITS, K, LAG, eps, root, T: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Y = activation(weight * root * (x - mean) * rstd + bias); stats = (mean, rstd) of all groups.

    If T.held, one program takes R groups.
    """
    ACC: tl.constexpr = F.acc
    t = tl.program_id(0)
    WIDTH = WIDTH_UNITS * T.unit
    sizes = G, CHANNELS, HW, WIDTH
    vectors = weight_ptr, bias_ptr, root
    GROUPS = N * G
    if T.held:
        groups = t * T.r + tl.arange(0, T.r)
        inside = groups < GROUPS
        runs = _runs(groups, inside, 0, sizes, T)
        x = load(x_ptr, runs[0], runs[1], T.even, LAST=False)
        n = WIDTH.to(ACC)
        mean, m2, d = _moments(x, x_ptr, groups, inside, 0, n, WIDTH, runs[1], T, ACC)
        rstd = save_statistics(stats_ptr, groups, inside, GROUPS, mean, m2, n, eps, ACC)
        _normalise(d, y_ptr, vectors, runs, rstd, T, F)
    else:
        if t < GROUPS * K:
            group = t // K
            k = t - group * K
            groups = group + tl.arange(0, 1)
            inside = groups < GROUPS
            runs = _runs(groups, inside, k, sizes, T)
            x = load(x_ptr, runs[0], runs[1], T.even, LAST=False)
            count = merging.tile_counts(k, WIDTH, T.block, ACC)
            mean, m2, d = _moments(
                x, x_ptr, groups, inside, k, count, WIDTH, runs[1], T, ACC
            )
            scratch = partial_ptr, counters_ptr
            parts = GROUPS, K, WIDTH, T.block, 1
            mean, m2, last = merging.publish_part(
                mean, m2, scratch, group, k, parts, 1, ACC, False, MOMENTS=True
            )
            if last:
                n = WIDTH.to(ACC)
                save_statistics(stats_ptr, groups, inside, GROUPS, mean, m2, n, eps, ACC)
                arrive(ready_flag(counters_ptr, group, GROUPS, K))
        u = t - LAG
        if u >= 0:
            group = u // K
            k = K - 1 - (u - group * K)
            groups = group + tl.arange(0, 1)
            inside = groups < GROUPS
            runs = _runs(groups, inside, k, sizes, T)
            x = load(x_ptr, runs[0], runs[1], T.even, LAST=True)
            wait(ready_flag(counters_ptr, group, GROUPS, K), 1, K)
            mean, rstd = load_both(stats_ptr, groups, inside, GROUPS)
            d = x.to(ACC) - mean[:, None, None]
            _normalise(d, y_ptr, vectors, runs, rstd, T, F)


@kernel
def group_norm_planes_solo_forward(
    x_ptr, weight_ptr, bias_ptr, y_ptr, stats_ptr,
    N, G, CHANNELS, HW, WIDTH_UNITS, K, eps, root, T: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """`group_norm_planes_forward`, where one program reads a group of several tiles twice.

    A lane is one place of all the tiles. First, each lane's moments are updated tile by tile, by
    Welford's method: doi:10.1080/00401706.1962.10490022.
    """
    ACC: tl.constexpr = F.acc
    GROUPS = N * G
    WIDTH = WIDTH_UNITS * T.unit
    sizes = G, CHANNELS, HW, WIDTH
    vectors = weight_ptr, bias_ptr, root
    groups = tl.program_id(0) + tl.arange(0, 1)
    inside = groups < GROUPS
    start = groups.to(tl.int64) if T.wide else groups
    # Distances from one of the values, so that a large mean costs no precision.
    first = tl.load(x_ptr + start * WIDTH).to(ACC)
    count = tl.full([], 0.0, ACC)
    means = tl.zeros([1, T.block // T.run, T.run], ACC)
    m2s = tl.zeros([1, T.block // T.run, T.run], ACC)
    for k in tl.range(0, K, num_stages=T.stages):
        offsets, mask, channels, live = _runs(groups, inside, k, sizes, T)
        x = load(x_ptr, offsets, mask, T.even, LAST=False)
        d = x.to(ACC) - first[:, None, None] - means
        d = d if T.even else tl.where(mask, d, 0.0)
        count += 1.0
        fraction = 1.0 / count
        means += d * fraction
        m2s += d * d * (1.0 - fraction)
    n = WIDTH.to(ACC)
    offsets, mask, channels, live = _runs(groups, inside, K - 1, sizes, T)
    counts = tl.where(mask, count, count - 1.0)
    mean = _sum(means * counts, 1) / n
    spread = means - mean[:, None, None]
    m2 = _sum(m2s + counts * spread * spread, 1)
    rstd = save_statistics(
        stats_ptr, groups, inside, GROUPS, first + mean, m2, n, eps, ACC
    )
    for turn in tl.range(0, K, num_stages=T.stages):
        k = K - 1 - turn
        runs = _runs(groups, inside, k, sizes, T)
        x = load(x_ptr, runs[0], runs[1], T.even, LAST=True)
        d = x.to(ACC) - first[:, None, None] - mean[:, None, None]
        _normalise(d, y_ptr, vectors, runs, rstd, T, F)


@triton.jit
def _planes(groups, inside, kc, ks, CHANNELS, HW, T):
    """Tile (kc, ks) of some groups: offsets and mask; its channels in a group, and their mask."""
    own = kc * T.cb + tl.arange(0, T.cb)
    places = ks * T.sb + tl.arange(0, T.sb)
    live = inside[:, None] & (own < CHANNELS)[None, :]
    mask = live[:, :, None] & (places < HW)[None, None, :]
    if T.wide:
        groups = groups.to(tl.int64)
    planes = (groups * CHANNELS)[:, None] + own[None, :]
    return planes[:, :, None] * HW + places[None, None, :], mask, own, live


@triton.jit
def _gradient(dy, x, vectors, channels, live, mean, rstd, F):
    """Compute dz, the gradient of the activation's input, and x - mean.

    It also returns the weight, and the weight times rstd and root.
    """
    weight_ptr, bias_ptr, root = vectors
    weight = load_vector(weight_ptr, channels, live, 1.0, F.acc, F.weight)
    bias = load_vector(bias_ptr, channels, live, 0.0, F.acc, F.bias)
    scale = weight * (rstd * scalar(root, F.acc))[:, None]
    centred = x.to(F.acc) - mean[:, None, None]
    dz = gradient_before(dy, centred, scale[:, :, None], bias[:, :, None], F)
    return dz, centred, weight, scale


@triton.jit
def _write_dx(dx_ptr, area, dz, centred, scale, rstd, means, root, T, ACC):
    """Write dx. means: the group's means of g and g * xhat, where g = dz * weight."""
    offsets, mask = area
    mean_g, mean_gx = means
    rstd_root = rstd * scalar(root, ACC)
    slope = rstd_root * rstd * mean_gx
    shift = centred * slope[:, None, None] + (rstd_root * mean_g)[:, None, None]
    dx = dz * scale[:, :, None] - shift
    store(dx_ptr, offsets, dx, mask, T.even, LAST=not T.held)


@triton.jit
def _publish_sums(sums_ptr, part, channels, live, C, sum_dz, sum_dz_xhat, F):
    """Store sums of some channels in a part, which has a row of C sums per wanted gradient."""
    part_ptr = sums_ptr + (part * (F.dweight + F.dbias)).to(tl.int64) * C
    if F.dweight:
        tl.store(part_ptr + channels, sum_dz_xhat, mask=live)
        part_ptr += C
    if F.dbias:
        tl.store(part_ptr + channels, sum_dz, mask=live)


@kernel
def group_norm_planes_backward(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, stats_ptr, dx_ptr, dweight_ptr, dbias_ptr, partial_ptr,
    counters_ptr,
    N, G, CHANNELS, HW_UNITS, K, KS, LAG, SPLITS, root, T: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Compute the wanted gradients of `group_norm_planes_forward`.

    If T.held, one program takes R adjacent groups of every SPLITS-th sample.
    """
    ACC: tl.constexpr = F.acc
    R: tl.constexpr = T.r
    DX: tl.constexpr = F.dx
    SUMS: tl.constexpr = F.dweight or F.dbias
    t = tl.program_id(0)
    HW = HW_UNITS * T.unit
    GROUPS = N * G
    C = G * CHANNELS
    n = (CHANNELS * HW).to(ACC)
    vectors = weight_ptr, bias_ptr, root
    if T.held:
        programs = tl.cdiv(G, R) * SPLITS
        sums_ptr = partial_ptr
        done_ptr = counters_ptr
        if t < programs:
            split = t % SPLITS
            own_groups = (t // SPLITS) * R + tl.arange(0, R)
            inside = own_groups < G
            all_dz = tl.zeros([R, T.cb], ACC)
            all_dz_xhat = tl.zeros([R, T.cb], ACC)
            for sample in range(split, N, SPLITS):
                groups = sample * G + own_groups
                offsets, mask, own, live = _planes(groups, inside, 0, 0, CHANNELS, HW, T)
                channels = (own_groups * CHANNELS)[:, None] + own[None, :]
                mean, rstd = load_both(stats_ptr, groups, inside, GROUPS)
                dy = load(dy_ptr, offsets, mask, T.even, LAST=False)
                x = load(x_ptr, offsets, mask, T.even, LAST=False)
                dz, centred, weight, scale = _gradient(
                    dy, x, vectors, channels, live, mean, rstd, F
                )
                sum_dz, sum_dz_xhat = sum_both(dz, dz * centred, 2)
                sum_dz_xhat *= rstd[:, None]
                if SUMS:
                    all_dz += sum_dz
                    all_dz_xhat += sum_dz_xhat
                if DX:
                    sum_g, sum_gx = sum_both(sum_dz * weight, sum_dz_xhat * weight, 1)
                    means = sum_g / n, sum_gx / n
                    area = offsets, mask
                    _write_dx(dx_ptr, area, dz, centred, scale, rstd, means, root, T, ACC)
            if SUMS:
                own = tl.arange(0, T.cb)
                channels = (own_groups * CHANNELS)[:, None] + own[None, :]
                live = inside[:, None] & (own < CHANNELS)[None, :]
                _publish_sums(sums_ptr, split, channels, live, C, all_dz, all_dz_xhat, F)
                arrive(done_ptr)
        f = t - programs
        arrivals = programs
        parts = SPLITS
    else:
        tiles = GROUPS * K
        means_ptr = merging.after_parts(partial_ptr, GROUPS, K, 1)
        sums_ptr = means_ptr + 2 * GROUPS
        done_ptr = ready_flag(counters_ptr, GROUPS, GROUPS, K)
        if t < tiles:
            group = t // K
            k = t - group * K
            kc = k // KS
            ks = k - kc * KS
            groups = group + tl.arange(0, 1)
            inside = groups < GROUPS
            offsets, mask, own, live = _planes(groups, inside, kc, ks, CHANNELS, HW, T)
            channels = ((groups % G) * CHANNELS)[:, None] + own[None, :]
            mean, rstd = load_both(stats_ptr, groups, inside, GROUPS)
            dy = load(dy_ptr, offsets, mask, T.even, LAST=not DX)
            x = load(x_ptr, offsets, mask, T.even, LAST=not DX)
            dz, centred, weight, scale = _gradient(
                dy, x, vectors, channels, live, mean, rstd, F
            )
            sum_dz, sum_dz_xhat = sum_both(dz, dz * centred, 2)
            sum_dz_xhat *= rstd[:, None]
            if SUMS:
                part = (group // G) * KS + ks
                _publish_sums(sums_ptr, part, channels, live, C, sum_dz, sum_dz_xhat, F)
            if DX:
                sum_g, sum_gx = sum_both(sum_dz * weight, sum_dz_xhat * weight, 1)
                scratch = partial_ptr, counters_ptr
                parts = GROUPS, K, K, 1, 1
                sum_g, sum_gx, last = merging.publish_part(
                    sum_g, sum_gx, scratch, group, k, parts, 1, ACC, False, MOMENTS=False
                )
                if last:
                    tl.store(means_ptr + groups, sum_g / n)
                    tl.store(means_ptr + GROUPS + groups, sum_gx / n)
                    arrive(ready_flag(counters_ptr, group, GROUPS, K))
                    if SUMS:  # the group's tiles have all published theirs
                        arrive(done_ptr)
            else:
                arrive(done_ptr)
        u = t - LAG
        if DX:
            if (u >= 0) & (u < tiles):
                group = u // K
                k = K - 1 - (u - group * K)
                kc = k // KS
                groups = group + tl.arange(0, 1)
                inside = groups < GROUPS
                offsets, mask, own, live = _planes(
                    groups, inside, kc, k - kc * KS, CHANNELS, HW, T
                )
                channels = ((groups % G) * CHANNELS)[:, None] + own[None, :]
                mean, rstd = load_both(stats_ptr, groups, inside, GROUPS)
                dy = load(dy_ptr, offsets, mask, T.even, LAST=True)
                x = load(x_ptr, offsets, mask, T.even, LAST=True)
                wait(ready_flag(counters_ptr, group, GROUPS, K), 1, K)
                means = load_both(means_ptr, groups, inside, GROUPS)
                dz, centred, _, scale = _gradient(
                    dy, x, vectors, channels, live, mean, rstd, F
                )
                area = offsets, mask
                _write_dx(dx_ptr, area, dz, centred, scale, rstd, means, root, T, ACC)
        f = u - tiles
        arrivals = GROUPS if DX else tiles
        parts = N * KS
    if SUMS:
        if f >= 0:
            wait(done_ptr, arrivals, tl.cdiv(C, T.finish))
            gradients = dweight_ptr, dbias_ptr, dbias_ptr
            stretch = sums_ptr, f, C, parts
            sums: tl.constexpr = F.dweight + F.dbias
            merging.finish_gradients(gradients, stretch, root, T.finish, sums, True, F)
