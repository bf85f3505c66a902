// The collectives' operations over memory that peers can read and write, Hopper and later. Rows move by bulk copies
// through shared memory, so that few processors keep many bytes in flight.
//
// Compiled after rows.cuh and meet.cu, with WARPS (that compute on a row), GROUPS (such teams in a block, each with rows of its own),
// STAGES (rows in flight of a group) and EMULATED (one GPU stands in for one rank: no peers, paced by the clock).
//
// A team has WARPS warps that sum and normalise, and one that only starts loads. A stage is one peer's row; the sum over
// peers grows in registers. Full and empty stages are told by an mbarrier each.

constexpr int THREADS = WARPS * 32;
constexpr int PER_THREAD = (CHUNKS + THREADS - 1) / THREADS;  // chunks of a row that a thread holds
constexpr int TEAM = THREADS + 32;
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

__device__ __forceinline__ void bulk_store(char* target, u32 source) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(source), "r"(ROW) : "memory");
}

__device__ __forceinline__ void team_sync(int team) { asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(THREADS) : "memory"); }

__device__ __forceinline__ void hold_until(u64 time) {
    while (clock_ns() < time) __nanosleep(100);
}

struct Shared {
    char in[GROUPS][STAGES][ROW];
    char out[GROUPS][2][ROW];
    u64 full[GROUPS][STAGES], empty[GROUPS][STAGES];
    float squares[GROUPS][2][WARPS];
};

// Where this rank's rows lie at peer `p`. Emulated, one buffer stands for all peers': its p-th share of the rows.
__device__ __forceinline__ u64 first_row(const u64* lane, int tokens, int p) {
    u64 owner = EMULATED ? p : lane[RANK];
    return u64(tokens) * owner / lane[SIZE];
}

// rows: the residual (FUSED), this rank's rows out (REDUCE_SCATTER) or in (ALL_GATHER). pace: nanoseconds that the whole
// operation must take at least (EMULATED).
template <int OP, bool WIDE>
__device__ __forceinline__ void run(u64* lane, char* rows, const void* weight, int tokens, float eps, u64 pace) {
    extern __shared__ __align__(128) char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const u64 start = EMULATED ? clock_ns() : 0;
    const int team = threadIdx.x / TEAM, thread = threadIdx.x % TEAM;
    const u64 word = word_of(lane, OP, tokens);
    if (threadIdx.x == 0) {
        for (int i = 0; i < GROUPS * STAGES; ++i) {
            barrier_init(shared_address(&shared.full[0][0] + i), 1);
            barrier_init(shared_address(&shared.empty[0][0] + i), WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (!EMULATED && !arrive(lane, word, OP, tokens)) return;

    const u64 own_first = first_row(lane, tokens, 0);
    const int own = int(EMULATED ? u64(tokens) / lane[SIZE] : u64(tokens) * (lane[RANK] + 1) / lane[SIZE] - own_first);
    const int sources = OP == ALL_GATHER ? 0 : int(lane[EMULATED ? MULTICAST : SIZE]);
    const int targets = OP == REDUCE_SCATTER ? 0 : int(lane[EMULATED ? MULTICAST : SIZE]);
    const int first = team * gridDim.x + blockIdx.x, stride = GROUPS * gridDim.x;
    constexpr bool takes_rows = OP == FUSED || OP == ALL_GATHER;

    if (thread >= THREADS) {
        if (thread == THREADS) {
            asm volatile("fence.proxy.async;" ::: "memory");  // what peers wrote, for the copy engine to read
            u32 stage = 0, parity = 1;
            auto load = [&](const char* source) {
                barrier_wait(shared_address(&shared.empty[team][stage]), parity);
                u32 full = shared_address(&shared.full[team][stage]);
                barrier_expect(full, ROW);
                bulk_load(shared_address(shared.in[team][stage]), source, full);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            };
            for (int row = first; row < own; row += stride) {
                if (EMULATED) hold_until(start + pace * row / own);
                for (int p = 0; p < sources; ++p)
                    load(reinterpret_cast<const char*>(lane[SOURCES + p]) + (first_row(lane, tokens, p) + row) * ROW);
                if (takes_rows) load(rows + u64(row) * ROW);
            }
        }
    } else {
        float values[PER_THREAD][VECTOR];
        auto each = [&](auto body) {
#pragma unroll
            for (int i = 0; i < PER_THREAD; ++i) {
                int chunk = thread + i * THREADS;
                if (CHUNKS % THREADS == 0 || chunk < CHUNKS) body(i, chunk);
            }
        };
        u32 stage = 0, parity = 0, turn = 0;
        auto take = [&](auto body) {  // body(chunk's number, its elements) for the next row that has come
            barrier_wait(shared_address(&shared.full[team][stage]), parity);
            const Chunk* row = reinterpret_cast<const Chunk*>(shared.in[team][stage]);
            each([&](int i, int chunk) {
                float part[VECTOR];
                unpack(row[chunk], part);
                body(i, part);
            });
            __syncwarp();
            if (thread % 32 == 0) barrier_arrive(shared_address(&shared.empty[team][stage]));
            if (++stage == STAGES) stage = 0, parity ^= 1;
        };
        for (int row = first; row < own; row += stride, turn ^= 1) {
            for (int p = 0; p < sources; ++p)
                take([&](int i, const float* part) {
#pragma unroll
                    for (int k = 0; k < VECTOR; ++k) values[i][k] = p == 0 ? part[k] : values[i][k] + part[k];
                });
            if (takes_rows)
                take([&](int i, const float* part) {
#pragma unroll
                    for (int k = 0; k < VECTOR; ++k) values[i][k] = OP == ALL_GATHER ? part[k] : values[i][k] + part[k];
                });
            Chunk* private_row = reinterpret_cast<Chunk*>(rows + u64(row) * ROW);
            Chunk held[PER_THREAD];  // the row rounded, in half the registers of its sums
            float scale = 0.0f;
            if (OP == FUSED) {
                float squares = 0.0f;
                each([&](int i, int chunk) {
                    private_row[chunk] = held[i] = round_in_place(values[i]);
#pragma unroll
                    for (int k = 0; k < VECTOR; ++k) squares = fmaf(values[i][k], values[i][k], squares);
                });
                squares = warp_sum(squares);
                if (thread % 32 == 0) shared.squares[team][turn][thread / 32] = squares;
            } else if (OP == REDUCE_SCATTER) {
                each([&](int i, int chunk) { private_row[chunk] = pack(values[i]); });
                continue;
            } else {
                each([&](int i, int chunk) { held[i] = pack(values[i]); });
            }
            // The store that read this half of `out` two rows ago has read it.
            if (thread == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
            team_sync(team);
            if (OP == FUSED) {
                float squares = 0.0f;
#pragma unroll
                for (int i = 0; i < WARPS; ++i) squares += shared.squares[team][turn][i];
                scale = inverse_root(squares, eps);
            }
            Chunk* out = reinterpret_cast<Chunk*>(shared.out[team][turn]);
            each([&](int i, int chunk) {
                if (OP == FUSED) {
                    float x[VECTOR], factors[VECTOR];
                    unpack(held[i], x);
                    read_weight<WIDE>(weight, chunk, factors);
#pragma unroll
                    for (int k = 0; k < VECTOR; ++k) x[k] *= scale;
                    round_in_place(x);
#pragma unroll
                    for (int k = 0; k < VECTOR; ++k) x[k] *= factors[k];
                    held[i] = pack(x);
                }
                out[chunk] = held[i];
            });
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            team_sync(team);
            if (thread == 0) {
                for (int p = 0; p < targets; ++p)
                    bulk_store(reinterpret_cast<char*>(lane[TARGETS + p]) + (first_row(lane, tokens, p) + row) * ROW,
                               shared_address(out));
                asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            }
        }
        if (thread == 0) {
            asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // written, and not only read
            asm volatile("fence.proxy.async;" ::: "memory");
        }
    }
    if (!EMULATED) depart(lane, word, OP, tokens);
    if (EMULATED && threadIdx.x == 0) hold_until(start + pace);
}

#define KERNEL(name, operation, wide)                                                                         \
    extern "C" __global__ void __launch_bounds__(GROUPS * TEAM, 1)                                            \
        name(u64* lane, char* rows, const void* weight, int tokens, float eps, u64 pace) {                    \
        run<operation, wide>(lane, rows, weight, tokens, eps, pace);                                          \
    }

KERNEL(fused, FUSED, false)
KERNEL(fused_wide, FUSED, true)
KERNEL(all_reduce, ALL_REDUCE, false)
KERNEL(reduce_scatter, REDUCE_SCATTER, false)
KERNEL(all_gather, ALL_GATHER, false)
