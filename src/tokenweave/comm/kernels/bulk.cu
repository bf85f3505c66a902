// The collectives' operations over memory that peers can read and write, Hopper and later. Every row comes by a bulk copy
// through shared memory, so that few processors keep many bytes in flight.
//
// Compiled after rows.cuh and meet.cu, with WARPS (that compute on a row), GROUPS (such teams in a block, each with rows of
// its own), STAGES and OUTS (rows of a team on their way in and out) and EMULATED (one GPU stands in for one rank: no peers,
// paced by the clock).
//
// A team has WARPS warps that sum and normalise, and one that only starts loads. A stage is one row of a rank's or of the
// residual; the sum over ranks grows in registers. Full and empty stages are told by an mbarrier each. Of a row that goes
// out every warp sends its own part, and waits for no other; in this GPU's own memory it stores plainly.
//
// A processor of an H200 reads and writes 47 GB/s each at once, and of a row three are read and three written: 4096 tokens
// of 16 KB between two take at least 264 us on 8 blocks. Forms of this kernel took, on 8 and 16 blocks: two teams of 4
// warps with two rows of each on their way 276 and 230; own rows straight to registers 284 and 232; everything out by bulk
// copies as well, one team, 333 and 214; weights read for every row, which is sent before the next is summed, 315 and 239.

constexpr int THREADS = WARPS * 32;
constexpr int TEAM = THREADS + 32;
constexpr int SEGMENT = 32 * PER_THREAD<WARPS>;  // chunks of a warp
constexpr int MAX_RANKS = TARGETS - SOURCES;
// Of rows that peers send, bytes on their way at once: about what the links carry in a round trip. More than that wait in
// line before the link, and hold up the rows that go the other way: the same on 16 blocks of two teams took 215 us with one
// row of each team on its way and 242 with two. Emulated, there is no link to wait for.
constexpr int IN_FLIGHT = 640 << 10;
static_assert(ROW % 16 == 0, "rows must be whole chunks");
static_assert(STAGES >= 3, "two ranks' rows and the residual's are taken at once");

__device__ __forceinline__ u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }

__device__ __forceinline__ void barrier_init(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    u32 done = 0;
    while (!done)
        asm volatile(
            "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
            : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void bulk_load(u32 target, const char* source, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        ::"r"(target), "l"(source), "r"(ROW), "r"(barrier) : "memory");
}

__device__ __forceinline__ void bulk_store(char* target, u32 source, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 ::"l"(target), "r"(source), "r"(bytes) : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

template <int N> __device__ __forceinline__ void sent_but() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ void all_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void hold_until(u64 time) {
    while (clock_ns() < time) __nanosleep(100);
}

struct Shared {
    char in[GROUPS][STAGES][ROW];
    char out[GROUPS][OUTS][ROW];
    u64 full[GROUPS][STAGES], empty[GROUPS][STAGES], summed[GROUPS][2];
    char *from[MAX_RANKS], *to[MAX_RANKS];  // where this rank's rows begin at each peer
    float squares[GROUPS][4][WARPS];
    u64 kept;  // until the end: the operation's word, or when it began (EMULATED); here as registers are short
};

// What a block's threads have in common.
struct Work {
    int own, first, stride;  // this rank's rows, and which of them a team takes
    int sources, targets;    // ranks that rows come from and go to
    int home;                // the one of `targets` in this GPU's own memory
    int depth;               // stages in use
};

// A place in a team's ring of stages.
struct Place {
    u32 stage = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

template <int N> struct Rows { static constexpr int count = N; };

// Starts loads, in the order in which `finish` takes the rows, as stages become free. One thread of a team.
template <int OP>
__device__ __forceinline__ void start_loads(
    Shared& shared, const Work& work, int team, const char* rows, u64 pace) {
    asm volatile("fence.proxy.async;" ::: "memory");  // what peers wrote, for the copy engine to read
    Place next, freed;
    int started = 0;
    auto load = [&](const char* source) {
        if (++started > work.depth) {
            barrier_wait(shared_address(&shared.empty[team][freed.stage]), freed.parity);
            freed.advance();
        }
        u32 full = shared_address(&shared.full[team][next.stage]);
        barrier_expect(full, ROW);
        bulk_load(shared_address(shared.in[team][next.stage]), source, full);
        next.advance();
    };
    for (int row = work.first; row < work.own; row += work.stride) {
        if (EMULATED) hold_until(shared.kept + pace * row / work.own);
        for (int p = 0; p < work.sources; ++p) load(shared.from[p] + u64(row) * ROW);
        if (OP == FUSED || OP == ALL_GATHER) load(rows + u64(row) * ROW);
    }
}

// Sums, normalises and stores a team's rows. PAIR: of two ranks, all rows of a sum are taken at once, and the sums need no
// registers of their own.
template <int OP, bool WIDE, bool PAIR>
__device__ __forceinline__ void finish(
    Shared& shared, const Work& work, int team, int thread, char* rows, const void* weight, float eps) {
    constexpr int COUNT = PER_THREAD<WARPS>;
    const bool leads = thread % 32 == 0;
    auto each = [&](auto body) { each_chunk<WARPS>(thread, body); };
    Chunk factors[COUNT];
    if constexpr (OP == FUSED && !WIDE)
        each([&](int i, int chunk) { factors[i] = load_constant(static_cast<const Chunk*>(weight) + chunk); });
    Place place;
    // body(i, chunk, loaded): `loaded` are that chunk of the next rows that have come.
    auto take = [&](auto number, auto body) {
        constexpr int N = decltype(number)::count;
        Place taken[N];
#pragma unroll
        for (int n = 0; n < N; ++n, place.advance()) {
            taken[n] = place;
            barrier_wait(shared_address(&shared.full[team][place.stage]), place.parity);
        }
        each([&](int i, int chunk) {
            Chunk loaded[N];
#pragma unroll
            for (int n = 0; n < N; ++n) loaded[n] = reinterpret_cast<const Chunk*>(shared.in[team][taken[n].stage])[chunk];
            body(i, chunk, loaded);
        });
        fence_shared();  // read, before the copy engine may write there again
        __syncwarp();
#pragma unroll
        for (int n = 0; n < N; ++n)
            if (leads) barrier_arrive(shared_address(&shared.empty[team][taken[n].stage]));
    };
    // The team's n-th row: summed, and rounded in `held`.
    auto sum = [&](int row, int n, Chunk (&held)[COUNT]) {
        Chunk* private_row = reinterpret_cast<Chunk*>(rows + u64(row) * ROW);
        float squares = 0.0f;
        auto close = [&](int i, int chunk, float* sums) {  // of FUSED, the residual among the sums
            held[i] = round_in_place(sums);
            squares += squares_of(sums);
            store(private_row + chunk, held[i]);
        };
        if constexpr (OP == ALL_GATHER) {
            take(Rows<1>(), [&](int i, int, const Chunk* loaded) { held[i] = loaded[0]; });
        } else if constexpr (PAIR) {
            take(Rows<3>(), [&](int i, int chunk, const Chunk* loaded) {
                float sums[VECTOR];
                unpack(loaded[0], sums);
                add(sums, loaded[1]);
                add(sums, loaded[2]);
                close(i, chunk, sums);
            });
        } else {
            float sums[COUNT][VECTOR];
            each([&](int i, int) {
#pragma unroll
                for (int k = 0; k < VECTOR; ++k) sums[i][k] = -0.0f;  // which adds nothing to any number
            });
#pragma unroll 1
            for (int p = 0; p < work.sources; ++p)
                take(Rows<1>(), [&](int i, int, const Chunk* loaded) { add(sums[i], loaded[0]); });
            if constexpr (OP == FUSED)
                take(Rows<1>(), [&](int i, int chunk, const Chunk* loaded) {
                    add(sums[i], loaded[0]);
                    close(i, chunk, sums[i]);
                });
            else
                each([&](int i, int) { held[i] = pack(sums[i]); });
        }
        if constexpr (OP == FUSED) {
            squares = warp_sum(squares);
            if (leads) {
                shared.squares[team][n % 4][thread / 32] = squares;
                barrier_arrive(shared_address(&shared.summed[team][n % 2]));
            }
        }
        if constexpr (OP == REDUCE_SCATTER) each([&](int i, int chunk) { store(private_row + chunk, held[i]); });
    };
    int slot = 0;
    auto send = [&](int row, int n, const Chunk (&held)[COUNT]) {
        if constexpr (OP == REDUCE_SCATTER) return;
        float scale = 0.0f;
        if constexpr (OP == FUSED) {
            barrier_wait(shared_address(&shared.summed[team][n % 2]), n / 2 % 2);
            float squares = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS; ++i) squares += shared.squares[team][n % 4][i];
            scale = inverse_root(squares, eps);
        }
        if (leads) sent_but<OUTS - 1>();  // what this warp sent from here OUTS rows ago has been read
        __syncwarp();
        Chunk* out = reinterpret_cast<Chunk*>(shared.out[team][slot]);
        Chunk* home = reinterpret_cast<Chunk*>(shared.to[work.home] + u64(row) * ROW);
        each([&](int i, int chunk) {
            Chunk result = held[i];
            if constexpr (OP == FUSED && WIDE) result = normed<true>(result, scale, weight, chunk);
            else if constexpr (OP == FUSED) result = weighted(scaled(result, scale), factors[i]);
            out[chunk] = result;
            store(home + chunk, result);
        });
        fence_shared();
        __syncwarp();
        const int segment = thread / 32 * SEGMENT, count = min(SEGMENT, CHUNKS - segment);
        if (leads && count > 0) {
            const u64 offset = u64(row) * ROW + segment * 16;
#pragma unroll 1
            for (int p = 0; p < work.targets; ++p)
                if (p != work.home) bulk_store(shared.to[p] + offset, shared_address(out + segment), count * 16);
            bulk_commit();
        }
        if (++slot == OUTS) slot = 0;
    };
    Chunk held[COUNT];
    if constexpr (PAIR) {  // a row is summed before the one before it is sent: the other warps' squares have long come
        Chunk former[COUNT];
        for (int row = work.first, n = 0;; row += work.stride, ++n) {
            if (row < work.own) sum(row, n, held);
            if (n > 0) send(row - work.stride, n - 1, former);
            if (row >= work.own) break;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) former[i] = held[i];
        }
    } else {
        for (int row = work.first, n = 0; row < work.own; row += work.stride, ++n) {
            sum(row, n, held);
            send(row, n, held);
        }
    }
    if (leads) all_written();
}

template <int OP, bool WIDE>
__device__ __forceinline__ void run(u64* lane, char* rows, const void* weight, int tokens, float eps, u64 pace) {
    extern __shared__ __align__(128) char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const u64 start = EMULATED ? clock_ns() : 0;
    const u64 word = word_of(lane, OP, tokens), rank = lane[RANK];
    const int peers = int(lane[EMULATED ? MULTICAST : SIZE]);
    const int last = blockDim.x - 1 - threadIdx.x;  // the last threads prepare while the first meet the other ranks
    if (last == 0) {
        shared.kept = EMULATED ? start : word;
        for (int i = 0; i < GROUPS * STAGES; ++i) {
            barrier_init(shared_address(&shared.full[0][0] + i), 1);
            barrier_init(shared_address(&shared.empty[0][0] + i), WARPS);
        }
        for (int i = 0; i < GROUPS * 2; ++i) barrier_init(shared_address(&shared.summed[0][0] + i), WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    for (int p = last; p < peers; p += blockDim.x) {
        // Emulated, one buffer stands for all peers': its p-th share of the rows.
        const u64 first = first_row(lane, tokens, EMULATED ? p : rank) * ROW;
        shared.from[p] = reinterpret_cast<char*>(lane[SOURCES + p]) + first;
        shared.to[p] = reinterpret_cast<char*>(lane[TARGETS + p]) + first;
    }
    if (EMULATED) __syncthreads();
    else if (!arrive(lane, word, OP, tokens)) return;

    const int team = threadIdx.x / TEAM, thread = threadIdx.x % TEAM;
    Work work;
    work.own = int(first_row(lane, tokens, rank + 1) - first_row(lane, tokens, rank));
    work.first = team * gridDim.x + blockIdx.x;
    work.stride = GROUPS * gridDim.x;
    work.sources = OP == ALL_GATHER ? 0 : peers;
    work.targets = OP == REDUCE_SCATTER ? 0 : peers;
    work.home = int(rank);
    const int rows_in_flight = max(1, IN_FLIGHT / (ROW * GROUPS * int(gridDim.x)));
    // Of two ranks' stages one in three is the peer's, of more ranks' nearly every one is a peer's.
    work.depth = EMULATED ? STAGES : min(STAGES, rows_in_flight * (peers == 2 ? 3 : 2));
    if (thread == THREADS) {
        start_loads<OP>(shared, work, team, rows, pace);
    } else if (thread < THREADS) {
        if (OP == FUSED && peers == 2) finish<OP, WIDE, OP == FUSED>(shared, work, team, thread, rows, weight, eps);
        else finish<OP, WIDE, false>(shared, work, team, thread, rows, weight, eps);
    }
    if (!EMULATED) depart(lane, shared.kept, OP, tokens);
    if (EMULATED && threadIdx.x == 0) hold_until(shared.kept + pace);
}

KERNELS(GROUPS * TEAM)
