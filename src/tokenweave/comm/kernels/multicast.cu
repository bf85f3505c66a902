// The collectives' operations where the switch adds and copies (NVSwitch, Hopper and later): a row is read from all ranks
// at once, already summed in float32, and written to all at once. Compiled after rows.cuh and meet.cu, with WARPS.
//
// The sum comes rounded to the rows' type, in the switch's order: `y` is rounded twice, not once as elsewhere.

static_assert(ROW % 16 == 0, "rows must be whole chunks");

__device__ __forceinline__ Chunk load_sum(const Chunk* address) {
    Chunk c;
#if ELEMENT == 0
    float f[4];
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(f[0]), "=f"(f[1]), "=f"(f[2]), "=f"(f[3]) : "l"(address) : "memory");
    for (int i = 0; i < 4; ++i) c.word[i] = __float_as_uint(f[i]);
#elif ELEMENT == 1
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3]) : "l"(address) : "memory");
#else
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3]) : "l"(address) : "memory");
#endif
    return c;
}

__device__ __forceinline__ void store_all(Chunk* address, const Chunk& c) {
    asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"l"(address), "f"(__uint_as_float(c.word[0])), "f"(__uint_as_float(c.word[1])),
                   "f"(__uint_as_float(c.word[2])), "f"(__uint_as_float(c.word[3])) : "memory");
}

// A block takes one row after another; the next one's loads are under way while a row is worked on.
template <int OP, bool WIDE>
__device__ __forceinline__ void run(u64* lane, char* rows, const void* weight, int tokens, float eps, u64) {
    __shared__ float sums_of_squares[2][WARPS];
    const u64 word = word_of(lane, OP, tokens);
    if (!arrive(lane, word, OP, tokens)) return;
    asm volatile("fence.proxy.alias;" ::: "memory");  // what ranks wrote at their own addresses, to read at the shared one
    const u64 own_first = first_row(lane, tokens, lane[RANK]);
    const int own = int(first_row(lane, tokens, lane[RANK] + 1) - own_first);
    char* everywhere = reinterpret_cast<char*>(lane[MULTICAST]) + own_first * ROW;
    constexpr bool takes_rows = OP == FUSED || OP == ALL_GATHER;
    auto each = [&](auto body) { each_chunk<WARPS>(threadIdx.x, body); };
    Chunk sums[PER_THREAD<WARPS>], mine[PER_THREAD<WARPS>];
    auto load = [&](int row) {
        if (row >= own) return;
        each([&](int i, int chunk) {
            if (OP != ALL_GATHER) sums[i] = load_sum(reinterpret_cast<Chunk*>(everywhere + u64(row) * ROW) + chunk);
            if (takes_rows) mine[i] = load_once(reinterpret_cast<const Chunk*>(rows + u64(row) * ROW) + chunk);
        });
    };
    load(blockIdx.x);
    int turn = 0;
    for (int row = blockIdx.x; row < own; row += gridDim.x, turn ^= 1) {
        float squares = 0.0f;
        Chunk held[PER_THREAD<WARPS>];
        each([&](int i, int) {
            held[i] = OP == ALL_GATHER ? mine[i] : sums[i];
            if (OP == FUSED) {
                float sum[VECTOR];
                unpack(sums[i], sum);
                add(sum, mine[i]);
                held[i] = round_in_place(sum);
                squares += squares_of(sum);
            }
        });
        load(row + gridDim.x);
        Chunk* private_row = reinterpret_cast<Chunk*>(rows + u64(row) * ROW);
        Chunk* out = reinterpret_cast<Chunk*>(everywhere + u64(row) * ROW);
        float scale = 0.0f;
        if (OP == FUSED) {
            each([&](int i, int chunk) { private_row[chunk] = held[i]; });
            squares = warp_sum(squares);
            if (threadIdx.x % 32 == 0) sums_of_squares[turn][threadIdx.x / 32] = squares;
            __syncthreads();
            squares = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS; ++i) squares += sums_of_squares[turn][i];
            scale = inverse_root(squares, eps);
        }
        each([&](int i, int chunk) {
            if (OP == FUSED) held[i] = normed<WIDE>(held[i], scale, weight, chunk);
            if (OP == REDUCE_SCATTER) private_row[chunk] = held[i];
            else store_all(out + chunk, held[i]);
        });
    }
    asm volatile("fence.proxy.alias;" ::: "memory");
    depart(lane, word, OP, tokens);
}

KERNELS(WARPS * 32)
