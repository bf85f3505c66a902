// Waiting for the other ranks, as kernels of one block: a barrier, and the two ends of an operation whose body is a kernel
// without waits. Compiled after rows.cuh.

extern "C" __global__ void barrier(u64* lane) {
    u64 word = word_of(lane, BARRIER, 0);
    if (arrive(lane, word, BARRIER, 0)) depart(lane, word, BARRIER, 0);
}

extern "C" __global__ void come(u64* lane, int code, int tokens) { arrive(lane, word_of(lane, code, tokens), code, tokens); }

extern "C" __global__ void leave(u64* lane, int code, int tokens) {
    if (!load_volatile(lane + FAILED)) depart(lane, word_of(lane, code, tokens), code, tokens);
}
