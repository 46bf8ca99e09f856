// read_stream: read a buffer and do nothing with it, which is what measures read bandwidth.
//
// Grid      (blocks): blocks * blockDim.x threads walk the buffer together
// Threads   thread i reads the vectors i, i + threads, ...; UNROLL of them are in flight
// Shared    none
// Reads     16 * num_vectors bytes, each once, past L1
// Writes    sink, once in 2^32 threads: without a use of the data nothing would wait for the loads
// Empty     num_vectors = 0 is the empty kernel, whose time is the cost of a launch
#include "ptx.cuh"

// One block per SM is enough: left to itself the compiler saves registers for occupancy by waiting
// for the first load before it issues the last.
template <int UNROLL>
__global__ void __launch_bounds__(512, 1) read_stream(
    unsigned int* sink,           // [1]
    const uint4* data,            // [num_vectors]
    long long num_vectors) {
    const long long step = (long long)gridDim.x * blockDim.x;
    unsigned int fold = 0;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < num_vectors;
         i += UNROLL * step) {
        uint4 v[UNROLL];
        // Past the end a vector is read again rather than skipped: a load under a condition would
        // be waited for at once.
#pragma unroll
        for (int u = 0; u < UNROLL; u++) v[u] = load_16(data + min(i + u * step, num_vectors - 1));
#pragma unroll
        for (int u = 0; u < UNROLL; u++) fold += v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
    }
    if (fold == 0x9e3779b9u) sink[0] = fold;
}
