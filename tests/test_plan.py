"""The planner against brute force: masks, lengths, tiles and counts. No GPU, no torch op."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashattn import _plan

pytestmark = pytest.mark.cpu

LENGTH = st.integers(0, 70)
BOUND = st.just(-1) | st.integers(0, 80)
BLOCK = st.sampled_from([1, 2, 3, 16, 32, 64])
DEVICES = ("a100", "rtx4090", "h100", "h200")


def sees(row, key, seqlen_q, seqlen_k, left, right):
    center = row + seqlen_k - seqlen_q
    return (left < 0 or key >= center - left) and (right < 0 or key <= center + right)


def pairs(seqlen_q, seqlen_k, left, right):
    return {
        (i, j)
        for i in range(seqlen_q)
        for j in range(seqlen_k)
        if sees(i, j, seqlen_q, seqlen_k, left, right)
    }


@given(seqlen_q=LENGTH, seqlen_k=LENGTH, left=BOUND, right=BOUND)
def test_visible(seqlen_q, seqlen_k, left, right):
    mask = _plan.SequenceMask(seqlen_q, seqlen_k, left, right)
    visible = pairs(seqlen_q, seqlen_k, left, right)
    for row in range(seqlen_q):
        keys = {j for i, j in visible if i == row}
        assert set(range(*mask.visible_keys(row))) == keys
        assert {j for j in range(seqlen_k) if mask.visible(row, j)} == keys
    for key in range(seqlen_k):
        assert set(range(*mask.visible_rows(key))) == {i for i, j in visible if j == key}


@given(seqlen_q=LENGTH, seqlen_k=LENGTH, left=BOUND, right=BOUND, block_m=BLOCK, block_n=BLOCK)
def test_blocks(seqlen_q, seqlen_k, left, right, block_m, block_n):
    """Nothing visible is skipped, a full block hides nothing, and queries and keys agree on which
    pairs of blocks are visited (the backward counts on it where dq is summed in order)."""
    mask = _plan.SequenceMask(seqlen_q, seqlen_k, left, right)
    visible = pairs(seqlen_q, seqlen_k, left, right)
    touched = {(i // block_m, j // block_n) for i, j in visible}
    visited, full_by_rows = set(), set()
    for m in range(-(-seqlen_q // block_m)):
        begin, end, full_begin, full_end = mask.key_blocks(m * block_m, block_m, block_n)
        assert 0 <= begin <= full_begin <= full_end <= end
        visited |= {(m, n) for n in range(begin, end)}
        full_by_rows |= {(m, n) for n in range(full_begin, full_end)}
    assert touched <= visited
    for m, n in full_by_rows:
        for i in range(m * block_m, min((m + 1) * block_m, seqlen_q)):
            for j in range(n * block_n, (n + 1) * block_n):
                assert (i, j) in visible  # a full block has block_n real keys: no tail check there

    by_keys = set()
    for n in range(-(-seqlen_k // block_n)):
        begin, end, full_begin, full_end = mask.query_blocks(n * block_n, block_n, block_m)
        assert 0 <= begin <= full_begin <= full_end <= end
        by_keys |= {(m, n) for m in range(begin, end)}
        for m in range(full_begin, full_end):
            for i in range(m * block_m, (m + 1) * block_m):
                for j in range(n * block_n, (n + 1) * block_n):
                    assert (i, j) in visible
    assert by_keys == visited
    # Only blocks between two touched ones may be visited for nothing.
    for m, n in visited - touched:
        columns = [b for a, b in touched if a == m]
        assert columns == [] or min(columns) < n < max(columns)


@given(
    seqlen=st.integers(1, 2**30),
    left=BOUND | st.integers(0, 2**40),
    right=BOUND | st.integers(0, 2**40),
    row=st.integers(0, 2**30),
)
def test_long_sequences_do_not_overflow(seqlen, left, right, row):
    row = row % seqlen
    begin, end = _plan.SequenceMask(seqlen, seqlen, left, right).visible_keys(row)
    assert begin == (0 if left < 0 else max(0, row - left))
    assert end == (seqlen if right < 0 else min(seqlen, row + right + 1))


INT32 = st.integers(-(2**31), 2**31 - 1)


@given(
    rows=st.integers(0, 2**31),
    offsets=st.none() | st.lists(INT32 | st.integers(-3, 200), min_size=2, max_size=6),
    used=st.none() | st.lists(INT32, min_size=5, max_size=5),
)
def test_lengths_stay_inside(rows, offsets, used):
    """Whatever cu_seqlens and seqused hold, a sequence lies inside of its tensor."""
    batch = 3 if offsets is None else len(offsets) - 1
    for b in range(batch):
        begin, length = _plan.sequence(b, rows, offsets, used)
        assert begin >= 0
        assert length >= 0
        assert begin + length <= rows
        if offsets is None:
            assert begin == 0
            assert length == rows or used is not None
        elif 0 <= offsets[b] <= offsets[b + 1] <= rows:
            assert begin == offsets[b]
            whole = offsets[b + 1] - offsets[b]
            assert length == (whole if used is None else min(max(used[b], 0), whole))


def test_every_headdim_has_a_tile():
    for headdim in range(1, 257):
        for headdim_v in range(1, 257):
            index = _plan.head_dims_index(headdim, headdim_v)
            qk, v = _plan.HEAD_DIMS[index]
            assert headdim <= qk
            assert headdim_v <= v
            for smaller in _plan.HEAD_DIMS[:index]:
                assert headdim > smaller[0] or headdim_v > smaller[1]
    assert _plan.head_dims_index(257, 64) == -1
    assert _plan.head_dims_index(64, 257) == -1


def problem(**changes):
    values = {
        "batch": 2,
        "seqlen_q": 1000,
        "seqlen_k": 1000,
        "heads_q": 8,
        "heads_k": 2,
        "headdim": 128,
        "headdim_v": 128,
    }
    return _plan.Problem(**values | changes)


def check_tile(plan, device):
    assert plan.supported, plan.unsupported_reason
    assert 0 < plan.smem_bytes <= device.smem_per_block
    assert plan.block_m % 16 == 0
    assert plan.block_n % 16 == 0
    assert plan.warps in (4, 8, 12, 16)
    assert plan.stages >= 1


@pytest.mark.parametrize("name", DEVICES)
def test_tiles_fit_their_device(name):
    """Every head dim runs on every listed GPU, forward and backward."""
    device = _plan.device_by_name(name)
    for qk, v in _plan.HEAD_DIMS:
        for headdim, headdim_v in ((qk, v), (qk - 1, v - 1)):
            some = problem(headdim=headdim, headdim_v=headdim_v)
            check_tile(_plan.make_forward_plan(some, device), device)
            check_tile(_plan.make_backward_plan(some, device), device)


# KiB that a block may have, by compute capability: CUDA programming guide, "Technical
# Specifications per Compute Capability".
SHARED_MEMORY = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}


@given(
    capability=st.sampled_from(sorted(SHARED_MEMORY)),
    dims=st.tuples(st.integers(1, 256), st.integers(1, 256)),
)
def test_tiles_fit_every_architecture(capability, dims):
    kib = SHARED_MEMORY[capability]
    device = _plan.Device("some GPU", capability, 100, kib * 1024, (kib + 1) * 1024)
    some = problem(headdim=dims[0], headdim_v=dims[1])
    check_tile(_plan.make_forward_plan(some, device), device)
    check_tile(_plan.make_backward_plan(some, device), device)


def test_too_little_shared_memory_is_told():
    device = _plan.Device("small", 80, 100, 48 * 1024, 64 * 1024)
    plan = _plan.make_forward_plan(problem(headdim=256, headdim_v=256), device)
    assert not plan.supported
    assert "shared memory" in plan.unsupported_reason


def test_what_has_no_kernel_says_so():
    old = _plan.Device("V100", 70, 80, 96 * 1024, 96 * 1024)
    h200 = _plan.device_by_name("h200")
    for make in (_plan.make_forward_plan, _plan.make_backward_plan):
        plan = make(problem(), old)
        assert not plan.supported
        assert "8.0" in plan.unsupported_reason
        plan = make(problem(dtype="float32"), h200)
        assert not plan.supported
        assert "float32" in plan.unsupported_reason
        assert make(problem(dtype="float32"), _plan.device_by_name("cpu")).supported


def test_more_blocks_than_a_launch_has():
    h200 = _plan.device_by_name("h200")
    for is_packed in (False, True):
        rows, heads = {"seqlen_q": 1, "seqlen_k": 1}, {"heads_q": 64, "heads_k": 64}
        many = problem(packed=is_packed, batch=2**25, **rows, **heads)
        for make in (_plan.make_forward_plan, _plan.make_backward_plan):
            plan = make(many, h200)
            assert not plan.supported
            assert "blocks" in plan.unsupported_reason
            assert make(many, _plan.device_by_name("cpu")).supported


def test_unknown_device():
    assert _plan.device_by_name("abacus") is None


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        ("80;90a", 80, True),
        ("80;90a", 86, True),
        ("80;90a", 90, True),
        ("80;90a", 100, False),
        ("80+PTX;90a", 100, True),
        ("80;90+PTX", 120, True),
        ("90a", 80, False),
        ("90a", 100, False),
        ("86", 80, False),
        ("80", 75, False),
        ("", 90, False),
    ],
)
def test_architectures_of_a_build(archs, capability, runs):
    assert _plan.kernel_image_available(archs, capability) == runs


@pytest.mark.parametrize(
    ("archs", "capability", "arch"),
    [
        ("80+PTX;90a", 89, "sm_80"),
        ("80+PTX;90a", 90, "sm_90"),
        ("80+PTX;90a", 100, "sm_80"),
        ("80+PTX", 90, "sm_80"),
        ("80;90+PTX", 120, "sm_90"),
        ("90+PTX;120", 120, "sm_80"),
        (None, 90, "sm_90"),
    ],
)
def test_whose_code_runs(archs, capability, arch):
    """The backward's tile goes with it: the other one's kernel is no code at all there."""
    assert _plan.Device("some GPU", capability, 100, 99 << 10, 100 << 10, archs).arch == arch


def test_who_gets_the_sm90_kernel(monkeypatch):
    """Code for sm_90a, and head dims of whole 16 bytes: strides have no say, they change no bit."""
    h200 = _plan.device_by_name("h200")
    assert h200.sm90a == (True, True)

    def kernel(device, **options):
        return _plan.make_forward_plan(problem(**options), device).kernel

    assert kernel(h200) == kernel(h200, aligned16=False) == "forward_sm90"
    assert kernel(h200, headdim=100) == kernel(h200, headdim_v=36) == "forward_sm80"
    for archs, sm90 in (
        ("80+PTX;90a", True),
        ("80;90", False),
        ("90+PTX", False),
        ("80+PTX", False),
    ):
        device = _plan.Device("some GPU", 90, 132, 227 << 10, 228 << 10, archs)
        assert kernel(device) == ("forward_sm90" if sm90 else "forward_sm80")
    assert kernel(_plan.Device("B200", 100, 148, 227 << 10, 228 << 10)) == "forward_sm80"
    for excluded, left in (("1", (0, 0)), ("forward", (0, 1)), ("backward", (1, 0)), ("0", (1, 1))):
        monkeypatch.setenv("FLASHATTN_NO_SM90", excluded)
        device = _plan.Device("some GPU", 90, 132, 227 << 10, 228 << 10)
        assert device.sm90a == left
        assert kernel(device) == ("forward_sm90" if left[0] else "forward_sm80")


def test_who_gets_the_sm90_backward():
    h200 = _plan.device_by_name("h200")

    def kernel(**options):
        plan = _plan.make_backward_plan(problem(**options), h200)
        assert plan.supported
        return plan.kernel

    for dims, columns in (
        ((64, 64), 64),
        ((8, 64), 64),
        ((96, 96), 128),
        ((40, 128), 128),
        ((128, 64), 128),
        ((192, 128), 192),
        ((136, 64), 192),
        ((128, 136), 256),
        ((192, 192), 256),
        ((256, 8), 256),
    ):
        options = {"headdim": dims[0], "headdim_v": dims[1]}
        plan = _plan.make_backward_plan(problem(**options), h200)
        assert plan.accum_headdim == columns  # of the kernel that is compiled for them
        assert kernel(**options) == "backward_sm90"
        for others in ({"packed": True}, {"aligned16": False}):
            assert kernel(**options, **others) == "backward_sm90"
        # The order is that of dq's sums, but which gradients are wanted must not change another.
        for need_dq in (False, True):
            in_order = {"deterministic": True, "need_dq": need_dq}
            assert kernel(**options, **in_order) == "backward_sm80"
            assert kernel(**options, **in_order, batch=60) == "backward_sm90"  # whole heads
    assert kernel(seqlen_k=64) == kernel(packed=True, seqlen_k=128) == "backward_sm80"
    assert kernel(seqlen_k=65) == kernel(packed=True, seqlen_k=130) == "backward_sm90"
    assert kernel(headdim=256, seqlen_k=64) == "backward_sm80"
    assert kernel(headdim=100, headdim_v=100) == kernel(headdim=60, headdim_v=64) == "backward_sm80"


def test_order_of_the_sm90_tiles():
    """Where a head's tiles differ in work, a CTA must not get the same one of every head."""
    h200 = _plan.device_by_name("h200")

    def order(seqlen, headdim, right, **options):
        options = {"batch": 16384 // seqlen, "heads_q": 2048 // headdim} | options
        options |= {"heads_k": options["heads_q"], "headdim": headdim, "headdim_v": headdim}
        options |= {"seqlen_q": seqlen, "seqlen_k": seqlen, "window_right": right}
        a_problem = problem(**options)
        plan = _plan.make_forward_plan(a_problem, h200)
        return " ".join(_plan.report(plan, a_problem, h200).reasons)

    # 192 queries a tile: the last one of 512 or 1024 has fewer; 128 queries: all are whole.
    assert "rotated" in order(512, 64, -1)
    assert "rotated" not in order(512, 128, -1) and "head by head" in order(512, 128, -1)
    assert "pairs" in order(1024, 64, 0) and "rotated" in order(1024, 64, 0)
    assert "take turns" in order(512, 64, 0)
    assert "pairs" in order(512, 128, 0) and "head by head" in order(512, 128, 0)
    # A CTA for each, packed or few: none gets two of anything. One tile a head differs from none.
    for some in (order(512, 64, 0, packed=True), order(700, 64, -1, batch=1), order(64, 64, -1)):
        assert "differ" not in some, some


DIMS = st.sampled_from([(64, 64), (40, 72), (128, 128), (192, 128), (256, 256)])


@given(
    batch=st.integers(1, 3),
    seqlen_q=st.integers(1, 150),
    seqlen_k=st.integers(1, 150),
    left=BOUND,
    right=BOUND,
    dims=DIMS,
    name=st.sampled_from(["cpu", "h200"]),
    need=st.sampled_from([(True, True), (True, False), (False, True)]),
)
def test_counts(batch, seqlen_q, seqlen_k, left, right, dims, name, need):
    """FLOPs, bytes and blocks, counted one by one."""
    device = _plan.device_by_name(name)
    some = problem(
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        headdim=dims[0],
        headdim_v=dims[1],
        window_left=left,
        window_right=right,
        need_dq=need[0],
        need_dkv=need[1],
    )
    visible = pairs(seqlen_q, seqlen_k, left, right)
    forward = _plan.make_forward_plan(some, device)
    report = _plan.report(forward, some, device)
    assert report.flops == 2 * len(visible) * sum(dims) * batch * 8
    q, kv = batch * seqlen_q * 8, batch * seqlen_k * 2
    assert report.bytes == 2 * (q * sum(dims) + kv * sum(dims)) + 4 * q

    block_m, block_n = forward.block_m, forward.block_n
    rows, columns = (-(-seqlen_q // block_m), -(-seqlen_k // block_n))
    touched = {(i // block_m, j // block_n) for i, j in visible}
    assert report.all_blocks == rows * columns * batch * 8
    assert report.all_blocks >= report.visited_blocks >= len(touched) * batch * 8
    assert report.full_blocks <= report.visited_blocks
    assert report.reasons

    backward = _plan.make_backward_plan(some, device)
    flops = _plan.report(backward, some, device).flops
    products_qk, products_v = 1 + need[0] + need[1], 1 + need[1]
    per_pair = products_qk * dims[0] + products_v * dims[1]
    assert flops == 2 * len(visible) * per_pair * batch * 8


@given(
    batch=st.integers(0, 4),
    seqlen_q=st.integers(0, 3000),
    seqlen_k=st.integers(0, 3000),
    is_packed=st.booleans(),
    is_deterministic=st.booleans(),
    need_dq=st.booleans(),
    dims=DIMS,
)
def test_grids_and_workspace(batch, seqlen_q, seqlen_k, is_packed, is_deterministic, need_dq, dims):
    """Enough CTAs for every block of every sequence, and workspace that is linear in the rows."""
    device = _plan.device_by_name("h200")
    some = problem(
        packed=is_packed,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        headdim=dims[0],
        headdim_v=dims[1],
        deterministic=is_deterministic,
        need_dq=need_dq,
    )
    forward = _plan.make_forward_plan(some, device)
    backward = _plan.make_backward_plan(some, device)

    def worst_blocks(rows, block):
        """However the packed rows are shared among the sequences."""
        if not is_packed:
            return batch * -(-rows // block)
        if batch == 0:
            return 0
        partial = min(batch - 1, rows)  # one row each, and all others in one sequence
        return partial + -(-(rows - partial) // block)

    assert forward.tiles >= worst_blocks(seqlen_q, forward.block_m) * 8
    assert 0 <= forward.grid <= forward.tiles
    assert backward.tiles >= worst_blocks(seqlen_k, backward.block_n) * 2
    assert min(backward.tiles, 132) <= backward.grid <= backward.tiles

    def grouped_rows(group):
        """Query rows of a head when each sequence starts a group."""
        if is_packed:
            return (seqlen_q // group + batch) * group
        return batch * -(-seqlen_q // group) * group

    rows = grouped_rows(16) * 8
    sums_rows = backward.grid * 4 * -(-seqlen_q // 16) * 16 if backward.whole_heads else rows
    sums = 4 * sums_rows * (backward.accum_headdim if need_dq else 0)
    work = backward.workspace
    places = [work.pieces_dealt, work.dq_turn, work.dq_accum]
    places += [work.lse_log2, work.delta, work.bytes]
    assert places == sorted(places)
    assert all(place % 256 == 0 for place in places)
    assert backward.accum_rows == grouped_rows(16)
    assert work.lse_log2 - work.dq_accum >= sums
    assert work.delta - work.lse_log2 >= 4 * rows
    assert work.bytes - work.delta >= 4 * rows
    assert work.zeroed_bytes == (work.dq_accum if backward.whole_heads else work.lse_log2)
    if is_deterministic and need_dq and not backward.whole_heads:
        turns = worst_blocks(seqlen_q, backward.block_m) * 8
        assert work.dq_accum - work.dq_turn >= 4 * turns
    tails = 2 * backward.block_m
    assert work.bytes <= sums + 4 * (3 * rows + tails) + 4 * 9 * (batch + 3) * 8 + 6 * 256


def test_whole_heads():
    """Where heads fill the GPU and their sums L2, a CTA takes whole ones: dq's sums are its own and
    not zeroed. Every query must see a key, as none else writes its gradient."""
    device = _plan.device_by_name("h200")
    short = {"batch": 32, "heads_q": 32, "heads_k": 32, "seqlen_q": 500, "seqlen_k": 512}
    short |= {"headdim": 64, "headdim_v": 64, "window_right": 0}

    def plan(**changes):
        return _plan.make_backward_plan(problem(**short | changes), device)

    some = plan()
    assert some.whole_heads
    assert some.grid == 132
    assert some.tiles == 32 * 32 * 4
    work, sums = some.workspace, 4 * 132 * 512 * 64
    assert 0 <= work.lse_log2 - work.dq_accum - sums < 256
    assert work.zeroed_bytes == work.dq_accum
    grouped = plan(heads_k=8, deterministic=True)
    assert grouped.workspace.lse_log2 - grouped.workspace.dq_accum >= 4 * sums
    assert plan(need_dq=False).workspace.lse_log2 == work.dq_accum
    assert plan(batch=1, heads_q=120, heads_k=120).grid == 120
    for changes in (
        {"packed": True},
        {"partly_used": True},
        {"window_left": 100},
        {"seqlen_k": 499},
        {"batch": 1},
        {"batch": 5},  # 160 heads: two rounds for 132 SMs
        {"seqlen_q": 4096, "seqlen_k": 4096},
    ):
        assert not plan(**changes).whole_heads, changes
    # In a fixed order the other way is a slower kernel.
    for changes, is_whole in (
        *(({"batch": 1, "heads_q": h, "heads_k": h}, h >= 66) for h in (1, 65, 66, 132, 133, 264)),
        ({"seqlen_q": 4096, "seqlen_k": 4096}, True),
        ({"packed": True}, False),
        ({"partly_used": True}, False),
        ({"seqlen_k": 499}, False),
    ):
        ordered = plan(**changes, deterministic=True)
        assert ordered.whole_heads == is_whole, changes
        assert ordered.kernel == ("backward_sm90" if is_whole else "backward_sm80")


def test_packed_turns_do_not_collide():
    """Block m of sequence b has counter cu_seqlens[b] / block_m + b + m, all to itself."""
    device = _plan.device_by_name("h200")
    for lengths in ((1, 1, 1, 300), (64, 64, 64), (63, 65, 0, 128, 5), (200,), (0, 0, 1)):
        some = problem(packed=True, batch=len(lengths), seqlen_q=sum(lengths), deterministic=True)
        plan = _plan.make_backward_plan(some, device)
        block, taken, begin = plan.block_m, set(), 0
        for b, length in enumerate(lengths):
            for m in range(-(-length // block)):
                number = begin // block + b + m
                assert number not in taken
                assert number < plan.dq_turns_per_head
                taken.add(number)
            begin += length
