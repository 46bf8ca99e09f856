#pragma once
// One page of keys against up to 16 query heads on the tensor cores, transposed: the 16 keys are the
// rows of the product and the heads its columns, so that groups of up to 8 heads waste nothing of
// the row dimension and K and V enter as they lie in memory.
//
//   S^T [16 keys][8 heads] = K [16][D] . Q^T [D][8]
//   O^T [D][8 heads]      += V^T [D][16] . P^T [16][8]
//
// In a fragment of 16 x 8 results lane 4g + t holds rows g, g + 8 of columns 2t, 2t + 1.
#include "kv_ring.cuh"
#include "tree_node.cuh"

__device__ __forceinline__ unsigned int pack_pair(float lo, float hi, __nv_bfloat16) {
    const __nv_bfloat162 x = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<const unsigned int*>(&x);
}
__device__ __forceinline__ unsigned int pack_pair(float lo, float hi, __half) {
    const __half2 x = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<const unsigned int*>(&x);
}

// Two ones.
__device__ __forceinline__ unsigned int pair_of_ones(__nv_bfloat16) { return 0x3f803f80u; }
__device__ __forceinline__ unsigned int pair_of_ones(__half) { return 0x3c003c00u; }

// The queries of 8 * TILES heads as the right-hand side of the first product.
template <typename T, int D, int TILES>
struct QueryTile {
    unsigned int bits[TILES][D / 16][2];

    // q: first head. Columns from `heads` on repeat the last head; nobody reads their results.
    __device__ __forceinline__ void load(const T* q, long long stride_head, int heads) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            const int head = min(n * 8 + lane / 4, heads - 1);
            const unsigned int* row =
                reinterpret_cast<const unsigned int*>(q + head * stride_head) + lane % 4;
#pragma unroll
            for (int i = 0; i < D / 8; i++) bits[n][i / 2][i % 2] = __ldg(row + 4 * i);
        }
    }
};

// The state of one leaf: 8 * TILES heads, all D columns, spread over the warp.
template <typename T, int D, int TILES>
struct LeafState {
    float m[TILES][2], l[TILES][2];     // of the heads 2t, 2t + 1; l still to be summed over g
    float acc[TILES][D / 16][4];        // O^T: columns 16e + g, + 8 of the heads 2t, 2t + 1
    float w[TILES][4];                  // sums of the rounded weights of the heads 2t, 2t + 1, twice

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            m[n][0] = m[n][1] = neg_inf();
            l[n][0] = l[n][1] = 0.0f;
            w[n][0] = w[n][1] = w[n][2] = w[n][3] = 0.0f;
#pragma unroll
            for (int e = 0; e < D / 16; e++)
#pragma unroll
                for (int i = 0; i < 4; i++) acc[n][e][i] = -0.0f;
        }
    }

    // What was read is not to be trusted: the result becomes NaN.
    __device__ __forceinline__ void spoil() {
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            l[n][0] = l[n][1] = quiet_nan();
            w[n][0] = w[n][1] = w[n][2] = w[n][3] = quiet_nan();
        }
    }

    // One more page, `keys` of whose rows hold a key.
    __device__ __forceinline__ void add(const unsigned char* page, const QueryTile<T, D, TILES>& q,
                                        int keys, float scale_log2) {
        const int lane = threadIdx.x % 32;
        // ---- scores; two chains of sums halve the wait for the tensor cores
        float s[TILES][4] = {}, odd[TILES][4] = {};
        const int k_row = lane % 16, k_chunk = lane / 16;
#pragma unroll
        for (int j = 0; j < D / 16; j++) {
            unsigned int a[4];
            ldmatrix_x4(a, page + page_offset(k_row, 2 * j + k_chunk));
#pragma unroll
            for (int n = 0; n < TILES; n++)
                mma_m16n8k16(j % 2 ? odd[n] : s[n], a, q.bits[n][j], T());
        }
        // ---- softmax: the maximum is an integer, so f is a power of two
        const bool there[2] = {lane / 4 < keys, lane / 4 + 8 < keys};
        unsigned int p[TILES][2];
#pragma unroll
        for (int n = 0; n < TILES; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) s[n][i] += odd[n][i];
            float f[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float top = fmaxf(there[0] ? s[n][h] * scale_log2 : neg_inf(),
                                  there[1] ? s[n][h + 2] * scale_log2 : neg_inf());
#pragma unroll
                for (int step = 4; step < 32; step *= 2)
                    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
                const float M = fmaxf(m[n][h], ceilf(top)), base = M == neg_inf() ? 0.0f : -M;
                f[h] = exact_weight(m[n][h], M);
                m[n][h] = M;
                // fused: a product rounded first would cost large scores their low bits
                s[n][h] = there[0] ? ex2(fmaf(s[n][h], scale_log2, base)) : 0.0f;
                s[n][h + 2] = there[1] ? ex2(fmaf(s[n][h + 2], scale_log2, base)) : 0.0f;
                l[n][h] = l[n][h] * f[h] + (s[n][h] + s[n][h + 2]);
            }
#pragma unroll
            for (int e = 0; e < D / 16; e++)
#pragma unroll
                for (int i = 0; i < 4; i++) acc[n][e][i] *= f[i % 2];
#pragma unroll
            for (int i = 0; i < 4; i++) w[n][i] *= f[i % 2];
            // [key][head] fragments become [head][key] ones
            p[n][0] = movmatrix_trans(pack_pair(s[n][0], s[n][1], T()));
            p[n][1] = movmatrix_trans(pack_pair(s[n][2], s[n][3], T()));
        }
        // ---- output; the weights' own sum as the product with a V of ones
        const unsigned int one = pair_of_ones(T()), ones[4] = {one, one, one, one};
#pragma unroll
        for (int n = 0; n < TILES; n++) mma_m16n8k16(w[n], ones, p[n], T());
        const unsigned char* v = page + KvRing<T, D, 1>::K_BYTES;
        const int v_row = lane % 8 + lane / 16 * 8, v_chunk = lane / 8 % 2;
#pragma unroll
        for (int e = 0; e < D / 16; e++) {
            unsigned int a[4];
            ldmatrix_x4_trans(a, v + page_offset(v_row, 2 * e + v_chunk));
#pragma unroll
            for (int n = 0; n < TILES; n++) mma_m16n8k16(acc[n][e], a, p[n], T());
        }
    }

    // Sum the weights over the lanes that share a head.
    __device__ __forceinline__ void sum_weights() {
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int step = 4; step < 32; step *= 2)
                    l[n][h] += __shfl_xor_sync(0xffffffffu, l[n][h], step);
    }

    // The states of the first G heads, one after another, as TreeNode has them in memory.
    template <int G>
    __device__ __forceinline__ void store(float* to) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int head = n * 8 + lane % 4 * 2 + h;
                if (head >= G) continue;
                float* node = to + head * TreeNode<D, 32>::FLOATS;
#pragma unroll
                for (int e = 0; e < D / 16; e++) {
                    node[4 + 16 * e + lane / 4] = acc[n][e][h];
                    node[4 + 16 * e + lane / 4 + 8] = acc[n][e][h + 2];
                }
                if (lane < 4)
                    *reinterpret_cast<float4*>(node) = make_float4(m[n][h], l[n][h], w[n][h], 0.0f);
            }
    }
};
