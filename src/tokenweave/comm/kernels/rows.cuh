// What the GPU kernels of the collectives share: elements, flags between ranks, deadlines.
//
// Compiled by NVRTC, without headers, with ELEMENT (0 float32, 1 bfloat16, 2 float16: the order of shape.DTYPES) and
// HIDDEN defined.

typedef unsigned int u32;
typedef unsigned long long u64;

// Operations, as in operations.py.
constexpr int FUSED = 1, ALL_REDUCE = 2, REDUCE_SCATTER = 3, ALL_GATHER = 4, BARRIER = 7;
// Reasons and places in the page of control.py.
constexpr u64 LATE = 1, DEAD = 2, MISMATCH = 3;
constexpr int ABORT = 0, DEATH = 8, FINDINGS = 16, FINDING = 16;
// Words of a lane, as in lane_words.py: what is set when it is opened, then what only kernels change, then tables.
constexpr int RANK = 0, SIZE = 1, LANE = 2, TIMEOUT = 3, PAGE = 4, MULTICAST = 5, EPOCH = 8, FINISHED = 9, FAILED = 10;
constexpr int SOURCES = 16, TARGETS = 144, FLAGS = 272;

struct alignas(16) Chunk { u32 word[4]; };  // 16 bytes: what a thread moves at once

constexpr int ITEM = ELEMENT == 0 ? 4 : 2;
constexpr int VECTOR = 16 / ITEM;                // elements of a chunk
constexpr int ROW = HIDDEN * ITEM;               // bytes
constexpr int CHUNKS = ROW / 16;

__device__ __forceinline__ void unpack(u32 word, float& low, float& high) {
#if ELEMENT == 1
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xffff0000u);
#elif ELEMENT == 2
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(low), "=f"(high) : "r"(word));
#endif
}

// Rounds to the nearest, ties to even; NaN stays NaN.
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 word = 0;
#if ELEMENT == 1
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#elif ELEMENT == 2
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#endif
    return word;
}

__device__ __forceinline__ void unpack(const Chunk& chunk, float* values) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#if ELEMENT == 0
        values[i] = __uint_as_float(chunk.word[i]);
#else
        unpack(chunk.word[i], values[2 * i], values[2 * i + 1]);
#endif
    }
}

__device__ __forceinline__ Chunk pack(const float* values) {
    Chunk chunk;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#if ELEMENT == 0
        chunk.word[i] = __float_as_uint(values[i]);
#else
        chunk.word[i] = pack(values[2 * i], values[2 * i + 1]);
#endif
    }
    return chunk;
}

// The row as it is stored: y in `values` becomes what its rounded elements are.
__device__ __forceinline__ Chunk round_in_place(float* values) {
    Chunk chunk = pack(values);
    unpack(chunk, values);
    return chunk;
}

// 16 bytes at once, read once: they do not push the weight out of the near cache.
__device__ __forceinline__ Chunk load_once(const Chunk* address) {
    Chunk chunk;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(chunk.word[0]), "=r"(chunk.word[1]), "=r"(chunk.word[2]), "=r"(chunk.word[3]) : "l"(address));
    return chunk;
}

// 16 bytes at once of what no kernel writes meanwhile.
__device__ __forceinline__ Chunk load_constant(const Chunk* address) {
    Chunk chunk;
    asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(chunk.word[0]), "=r"(chunk.word[1]), "=r"(chunk.word[2]), "=r"(chunk.word[3]) : "l"(address));
    return chunk;
}

// A chunk's elements of the weight, which is of the rows' type or float32 (WIDE). Read again for every row, from a near
// cache: kept in registers, they spill.
template <bool WIDE> __device__ __forceinline__ void read_weight(const void* weight, int chunk, float* values) {
    const Chunk* chunks = static_cast<const Chunk*>(weight);
    if constexpr (WIDE && ELEMENT != 0) {
        for (int half = 0; half < 2; ++half) {
            Chunk part = load_constant(chunks + 2 * chunk + half);
            for (int i = 0; i < 4; ++i) values[4 * half + i] = __uint_as_float(part.word[i]);
        }
    } else {
        unpack(load_constant(chunks + chunk), values);
    }
}

__device__ __forceinline__ void add(float* sums, const Chunk& chunk) {
    float part[VECTOR];
    unpack(chunk, part);
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) sums[k] += part[k];
}

__device__ __forceinline__ float squares_of(const float* values) {
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) squares = fmaf(values[k], values[k], squares);
    return squares;
}

// Elements of a stored row, normed: scaled, rounded, and times the weight.
template <bool WIDE>
__device__ __forceinline__ Chunk normed(const Chunk& row, float scale, const void* weight, int chunk) {
    float x[VECTOR], factors[VECTOR];
    unpack(row, x);
    read_weight<WIDE>(weight, chunk, factors);
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) x[k] *= scale;
    round_in_place(x);
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) x[k] *= factors[k];
    return pack(x);
}

// How COUNT warps divide a row: each has so many chunks that lie side by side, a 32nd of them a thread.
template <int COUNT> constexpr int PER_THREAD = (CHUNKS + COUNT * 32 - 1) / (COUNT * 32);

// body(i, chunk's place in the row) for each chunk of a thread.
template <int COUNT, typename Body> __device__ __forceinline__ void each_chunk(int thread, Body body) {
    const int first = thread / 32 * 32 * PER_THREAD<COUNT> + thread % 32;
#pragma unroll
    for (int i = 0; i < PER_THREAD<COUNT>; ++i) {
        int chunk = first + i * 32;
        if (CHUNKS % (COUNT * 32) == 0 || chunk < CHUNKS) body(i, chunk);
    }
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}

// The divisor of the norm; once a row, so the exact square root costs nothing.
__device__ __forceinline__ float inverse_root(float squares, float eps) {
    return __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(squares, float(HIDDEN)), eps)));
}

__device__ __forceinline__ u64 clock_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

__device__ __forceinline__ u64 load_acquire(const u64* address) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ void store_release(u64* address, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ u64 load_volatile(const u64* address) {
    u64 value;
    asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

// Put down, in the host's memory, what this rank found wrong; the first finding of the lane only.
__device__ __noinline__ void report(u64* lane, u64 reason, u64 peer, u64 code, int tokens, u64 seen) {
    if (atomicCAS(lane + FAILED, 0ull, 1ull) != 0) return;
    volatile u64* page = reinterpret_cast<volatile u64*>(lane[PAGE]);
    volatile u64* line = page + FINDINGS + lane[RANK] * FINDING;
    u64 columns = code == BARRIER ? 0 : HIDDEN;
    u64 theirs = reason == MISMATCH ? seen & 15 : 0;
    line[0] = reason;
    line[1] = peer;
    line[2] = lane[LANE];
    line[3] = code | u64(ELEMENT) << 8;
    line[4] = tokens;
    line[5] = columns;
    line[6] = theirs == 0 ? 0 : theirs | u64(ELEMENT) << 8;
    line[7] = theirs == 0 ? 0 : (seen & 0xffffffffull) >> 4;
    line[8] = theirs == 0 ? 0 : HIDDEN;
    __threadfence_system();
    if (page[ABORT] == 0) page[ABORT] = 1 + lane[RANK];
    __threadfence_system();
}

// Wait until `flag` holds this operation's word. False once the group has ended.
__device__ __noinline__ bool wait_for(u64* lane, const u64* flag, u64 word, int peer, int code, int tokens) {
    u64 start = clock_ns();
    u64* page = reinterpret_cast<u64*>(lane[PAGE]);
    for (u32 spins = 1;; ++spins) {
        u64 seen = load_acquire(flag);
        if (seen == word) return true;
        if (seen >> 32 == word >> 32) {
            report(lane, MISMATCH, peer, code, tokens, seen);
            return false;
        }
        if (spins % 64 != 0) continue;
        if (load_volatile(lane + FAILED)) return false;
        if (clock_ns() - start > lane[TIMEOUT]) {
            report(lane, LATE, peer, code, tokens, 0);
            return false;
        }
        if (spins % 4096 != 0) continue;  // the page lies across PCIe: a microsecond a look
        if (load_volatile(page + ABORT)) {
            atomicExch(lane + FAILED, 1ull);
            return false;
        }
        u64 dead = load_volatile(page + DEATH);
        if (dead == u64(peer) + 1) {
            report(lane, DEAD, peer, code, tokens, 0);
            return false;
        }
    }
}

// The word that a rank shows its peers when it comes to its lane's next operation, and again when it is through.
__device__ __forceinline__ u64 word_of(const u64* lane, int code, int tokens) {
    return (load_volatile(lane + EPOCH) + 1) << 32 | u64(u32(tokens) << 4 | u32(code));
}

// Every rank has come to this operation, and what it wrote before is visible here (release by each peer's first block,
// acquire in every block). Called by all threads; false, for all, once the group has ended.
__device__ __forceinline__ bool arrive(u64* lane, u64 word, int code, int tokens) {
    bool ended = load_volatile(lane + FAILED) != 0;
    int size = lane[SIZE], rank = lane[RANK];
    for (int peer = threadIdx.x; peer < size && size > 1; peer += blockDim.x) {
        if (blockIdx.x == 0) store_release(reinterpret_cast<u64*>(lane[FLAGS + peer]) + rank, word);
        const u64* mine = reinterpret_cast<const u64*>(lane[FLAGS + rank]) + peer;
        ended = ended || !wait_for(lane, mine, word, peer, code, tokens);
    }
    return !__syncthreads_or(ended);
}

// Every rank is through: its rows lie in this rank's memory, and it has read this rank's. Called by all threads of every
// block once the block's own stores are done; only the last block waits. Moves the lane on to its next operation.
__device__ __forceinline__ void depart(u64* lane, u64 word, int code, int tokens) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        u64 before;  // the blocks' stores come before the last block's word to the peers
        asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], 1;" : "=l"(before) : "l"(lane + FINISHED) : "memory");
        last = before == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    if (threadIdx.x == 0) {
        lane[FINISHED] = 0;
        lane[EPOCH] = word >> 32;
    }
    int size = lane[SIZE], rank = lane[RANK];
    for (int peer = threadIdx.x; peer < size && size > 1; peer += blockDim.x) {
        store_release(reinterpret_cast<u64*>(lane[FLAGS + peer]) + size + rank, word);
        const u64* mine = reinterpret_cast<const u64*>(lane[FLAGS + rank]) + size + peer;
        wait_for(lane, mine, word, peer, code, tokens);
    }
}

// The first of the rows of `rank`, and so the end of those of the one before.
__device__ __forceinline__ u64 first_row(const u64* lane, int tokens, u64 rank) { return u64(tokens) * rank / lane[SIZE]; }

// The kernels of a file that defines run<operation, weight is float32>. rows: the residual (FUSED), this rank's rows out
// (REDUCE_SCATTER) or in (ALL_GATHER). pace: nanoseconds that the whole operation must take at least (emulated ranks).
#define KERNEL(name, threads, ...)                                                       \
    extern "C" __global__ void __launch_bounds__(threads, 1)                             \
        name(u64* lane, char* rows, const void* weight, int tokens, float eps, u64 pace) { \
        run<__VA_ARGS__>(lane, rows, weight, tokens, eps, pace);                         \
    }
#define KERNELS(threads)                               \
    KERNEL(fused, threads, FUSED, false)               \
    KERNEL(fused_wide, threads, FUSED, true)           \
    KERNEL(all_reduce, threads, ALL_REDUCE, false)     \
    KERNEL(reduce_scatter, threads, REDUCE_SCATTER, false) \
    KERNEL(all_gather, threads, ALL_GATHER, false)
