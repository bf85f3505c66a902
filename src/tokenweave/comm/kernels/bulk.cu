// The collectives' operations over memory that peers can read and write, Hopper and later. Peers' rows come by bulk
// copies through shared memory, so that few processors keep many bytes in flight; this rank's own go straight to registers, a
// row ahead.
//
// Compiled after rows.cuh and meet.cu, with WARPS (that compute on a row), GROUPS (such teams in a block, each with rows of
// its own), STAGES and OUTS (rows of a team on their way in and out) and EMULATED (one GPU stands in for one rank: no peers,
// paced by the clock).
//
// A team has WARPS warps that sum and normalise, and one that only starts loads. A stage is one peer's row; the sum over
// peers grows in registers. Full and empty stages are told by an mbarrier each. Of a row that goes out every warp sends its
// own part, and waits for no other. In this GPU's own memory it is stored by plain stores: 4096 tokens of 16 KB between two
// H200s take 341 us on 8 blocks, all by bulk copies 359.

constexpr int THREADS = WARPS * 32;
constexpr int TEAM = THREADS + 32;
constexpr int SEGMENT = 32 * PER_THREAD<WARPS>;  // chunks of a warp
constexpr int MAX_RANKS = TARGETS - SOURCES;
// Of rows that peers send, bytes on their way at once: what the links carry in a round trip. More than that wait in line
// before the link, and hold up the rows that go the other way: 4096 tokens of 16 KB between two H200s, on 16 blocks of two
// teams, take 215 us with one row of each team on its way and 242 with two. Emulated, there is no link to wait for.
constexpr int IN_FLIGHT = EMULATED ? 1 << 30 : 512 << 10;
static_assert(ROW % 16 == 0, "rows must be whole chunks");

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

__device__ __forceinline__ void team_sync(int team) {
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(THREADS) : "memory");
}

__device__ __forceinline__ void hold_until(u64 time) {
    while (clock_ns() < time) __nanosleep(100);
}

struct Shared {
    char in[GROUPS][STAGES][ROW];
    char out[GROUPS][OUTS][ROW];
    u64 full[GROUPS][STAGES], empty[GROUPS][STAGES];
    char *from[MAX_RANKS], *to[MAX_RANKS];  // where this rank's rows begin at each peer
    float squares[GROUPS][2][WARPS];
    u64 kept;  // until the end: the operation's word, or when it began (EMULATED); here as registers are short
};

// What a block's threads have in common.
struct Work {
    int own, first, stride;  // this rank's rows, and which of them a team takes
    int sources, targets;    // peers that rows come from and go to
    // The source that is read without a stage, -1 for none: this GPU's own, if it is one of the first two, which a sum in
    // rank order may begin with.
    int here;
    int home;   // the one of `targets` in this GPU's own memory
    int depth;  // stages in use
};

// Starts loads, in the order in which `finish` takes the rows, as stages become free. One thread of a team.
template <int OP>
__device__ __forceinline__ void start_loads(
    Shared& shared, const Work& work, int team, const char* rows, u64 pace) {
    asm volatile("fence.proxy.async;" ::: "memory");  // what peers wrote, for the copy engine to read
    u32 stage = 0, parity = 1;
    auto load = [&](const char* source) {
        barrier_wait(shared_address(&shared.empty[team][stage]), parity);
        u32 full = shared_address(&shared.full[team][stage]);
        barrier_expect(full, ROW);
        bulk_load(shared_address(shared.in[team][stage]), source, full);
        if (++stage == work.depth) stage = 0, parity ^= 1;
    };
    for (int row = work.first; row < work.own; row += work.stride) {
        if (EMULATED) hold_until(shared.kept + pace * row / work.own);
        for (int p = 0; p < work.sources; ++p)
            if (p != work.here) load(shared.from[p] + u64(row) * ROW);
        if (OP == ALL_GATHER) load(rows + u64(row) * ROW);
    }
}

// Sums, normalises and stores a team's rows.
template <int OP, bool WIDE>
__device__ __forceinline__ void finish(
    Shared& shared, const Work& work, int team, int thread, char* rows, const void* weight, float eps) {
    constexpr int COUNT = PER_THREAD<WARPS>;
    const bool leads = thread % 32 == 0;
    auto each = [&](auto body) { each_chunk<WARPS>(thread, body); };
    float values[COUNT][VECTOR];
    Chunk mine[COUNT], before[COUNT];  // of the next row: this rank's partial, and the residual
    auto fetch = [&](int row) {
        if (row >= work.own) return;
        if (OP != ALL_GATHER && work.here >= 0) {
            const Chunk* partial = reinterpret_cast<const Chunk*>(shared.from[work.here] + u64(row) * ROW);
            each([&](int i, int chunk) { mine[i] = load_once(partial + chunk); });
        }
        if (OP == FUSED) {
            const Chunk* residual = reinterpret_cast<const Chunk*>(rows + u64(row) * ROW);
            each([&](int i, int chunk) { before[i] = load_once(residual + chunk); });
        }
    };
    u32 stage = 0, parity = 0;
    auto take = [&](auto body) {  // body(i, chunk) of the next row that has come
        barrier_wait(shared_address(&shared.full[team][stage]), parity);
        const Chunk* row = reinterpret_cast<const Chunk*>(shared.in[team][stage]);
        each([&](int i, int chunk) { body(i, Chunk(row[chunk])); });
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // read, before the copy engine may write there again
        __syncwarp();
        if (leads) barrier_arrive(shared_address(&shared.empty[team][stage]));
        if (++stage == work.depth) stage = 0, parity ^= 1;
    };
    int turn = 0, place = 0;
    fetch(work.first);
    for (int row = work.first; row < work.own; row += work.stride, turn ^= 1) {
        Chunk* private_row = reinterpret_cast<Chunk*>(rows + u64(row) * ROW);
        Chunk held[COUNT];  // the row rounded, in half the registers of its sums
        if (OP == ALL_GATHER) {
            take([&](int i, const Chunk& chunk) { held[i] = chunk; });
        } else {
            each([&](int i, int) {
                if (work.here >= 0) unpack(mine[i], values[i]);
                else
#pragma unroll
                    for (int k = 0; k < VECTOR; ++k) values[i][k] = -0.0f;  // which adds nothing to any number
            });
#pragma unroll 1
            for (int p = 0; p < work.sources; ++p)
                if (p != work.here) take([&](int i, const Chunk& chunk) { add(values[i], chunk); });
        }
        if (OP == FUSED) {
            float squares = 0.0f;
            each([&](int i, int chunk) {
                add(values[i], before[i]);
                private_row[chunk] = held[i] = round_in_place(values[i]);
                squares += squares_of(values[i]);
            });
            squares = warp_sum(squares);
            if (leads) shared.squares[team][turn][thread / 32] = squares;
        } else if (OP != ALL_GATHER) {
            each([&](int i, int) { held[i] = pack(values[i]); });
        }
        fetch(row + work.stride);
        if (OP == REDUCE_SCATTER) {
            each([&](int i, int chunk) { private_row[chunk] = held[i]; });
            continue;
        }
        float scale = 0.0f;
        if (OP == FUSED) {
            team_sync(team);
            float squares = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS; ++i) squares += shared.squares[team][turn][i];
            scale = inverse_root(squares, eps);
        }
        // What this warp sent from here OUTS rows ago has been read.
        if (leads) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(OUTS - 1) : "memory");
        __syncwarp();
        Chunk* out = reinterpret_cast<Chunk*>(shared.out[team][place]);
        Chunk* home = reinterpret_cast<Chunk*>(shared.to[work.home] + u64(row) * ROW);
        each([&](int i, int chunk) {
            Chunk result = OP == FUSED ? normed<WIDE>(held[i], scale, weight, chunk) : held[i];
            out[chunk] = result;
            home[chunk] = result;
        });
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        const int segment = thread / 32 * SEGMENT, count = min(SEGMENT, CHUNKS - segment);
        if (leads && count > 0) {
            const u64 offset = u64(row) * ROW + segment * 16;
#pragma unroll 1
            for (int p = 0; p < work.targets; ++p)
                if (p != work.home) bulk_store(shared.to[p] + offset, shared_address(out + segment), count * 16);
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
        if (++place == OUTS) place = 0;
    }
    if (leads) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // written, and not only read
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
    work.here = rank > 1 || (EMULATED && peers == 1) ? -1 : int(rank);  // one emulated peer is the switch
    const int rows_in_flight = (IN_FLIGHT - 1) / (ROW * GROUPS * int(gridDim.x)) + 1;
    work.depth = min(STAGES, max(rows_in_flight, GROUPS == 1 ? 2 : 1));
    if (thread < THREADS) finish<OP, WIDE>(shared, work, team, thread, rows, weight, eps);
    else if (thread == THREADS) start_loads<OP>(shared, work, team, rows, pace);
    if (!EMULATED) depart(lane, shared.kept, OP, tokens);
    if (EMULATED && threadIdx.x == 0) hold_until(shared.kept + pace);
}

KERNELS(GROUPS * TEAM)
