#pragma once
// One page of keys against up to 16 query heads on the tensor cores, transposed: the 16 keys are
// the rows of the product and the heads its columns, so that groups of up to 8 heads waste nothing
// of the row dimension and K and V enter as they lie in memory.
//
//   S^T [16 keys][8 heads] = K [16][D] . Q^T [D][8]
//   O^T [D][8 heads]      += V^T [D][16] . P^T [16][8]
#include "fragments.cuh"
#include "kv_ring.cuh"
#include "scores.cuh"
#include "tree_node.cuh"

// The state of one leaf: 8 * TILES heads, all D columns, spread over the warp.
template <typename TKV, int D, int TILES>
struct LeafState {
    using F = Fragments<TKV>;
    using Math = typename F::Math;

    float m[TILES][2], l[TILES][2];     // of the heads 2t, 2t + 1; l still to be summed over g
    float acc[TILES][D / 16][4];        // O^T: two columns (F::out_column) of the heads 2t, 2t + 1
    float w[TILES][4];                  // sums of rounded weights of the heads 2t, 2t + 1, twice

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

    // One more page, `keys` of whose rows hold a key; WINDOW: those before row `hidden` are not
    // visible.
    template <typename T, int OPTIONS>
    __device__ __forceinline__ void add(const unsigned char* page,
                                        const QueryTile<T, TKV, D, TILES>& q, int keys, int hidden,
                                        const Scores<OPTIONS, TILES>& scores) {
        constexpr int CHUNKS = D * sizeof(TKV) / 16;
        const int lane = threadIdx.x % 32;
        // ---- scores; two chains of sums, of one tile or two, halve the wait for the tensor cores
        constexpr bool PARTED = TILES == 1;
        float s[TILES][4] = {}, odd[TILES][4] = {};
        const int k_row = lane % 16, k_chunk = lane / 16;
#pragma unroll
        for (int j = 0; j < D / 16; j += F::N) {
            unsigned int a[F::N][4];
            F::keys(a, page + page_offset<CHUNKS>(k_row, 2 * j / F::N + k_chunk));
#pragma unroll
            for (int i = 0; i < F::N; i++)
#pragma unroll
                for (int n = 0; n < TILES; n++)
                    mma_m16n8k16(PARTED && (j + i) % 2 ? odd[n] : s[n], a[i], q.bits[n][j + i],
                                 Math());
        }
        // ---- softmax: the maximum is an integer, so f is a power of two
        bool there[2] = {lane / 4 < keys, lane / 4 + 8 < keys};
        if constexpr (OPTIONS & WINDOW)
            there[0] &= lane / 4 >= hidden, there[1] &= lane / 4 + 8 >= hidden;
        unsigned int p[TILES][2];
#pragma unroll
        for (int n = 0; n < TILES; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if constexpr (PARTED) s[n][i] += odd[n][i];
                if constexpr (QueryTile<T, TKV, D, TILES>::SCALED)
                    s[n][i] *= q.unit[n][i % 2];
                s[n][i] = scores.of(s[n][i], n, i % 2, lane / 4 + i / 2 * 8 + 1 - keys);
            }
            float f[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float top = fmaxf(there[0] ? s[n][h] * scores.scale : neg_inf(),
                                  there[1] ? s[n][h + 2] * scores.scale : neg_inf());
#pragma unroll
                for (int step = 4; step < 32; step *= 2)
                    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
                const float M = fmaxf(m[n][h], ceilf(top)), base = M == neg_inf() ? 0.0f : -M;
                f[h] = exact_weight(m[n][h], M);
                m[n][h] = M;
                // fused: a product rounded first would cost large scores their low bits
                s[n][h] = there[0] ? ex2(fmaf(s[n][h], scores.scale, base)) : 0.0f;
                s[n][h + 2] = there[1] ? ex2(fmaf(s[n][h + 2], scores.scale, base)) : 0.0f;
                l[n][h] = l[n][h] * f[h] + (s[n][h] + s[n][h + 2]);
            }
            if (f[0] != 1.0f || f[1] != 1.0f) {          // a new maximum: rare after a few pages
#pragma unroll
                for (int e = 0; e < D / 16; e++)
#pragma unroll
                    for (int i = 0; i < 4; i++) acc[n][e][i] *= f[i % 2];
#pragma unroll
                for (int i = 0; i < 4; i++) w[n][i] *= f[i % 2];
            }
            // [key][head] fragments become [head][key] ones
            p[n][0] = movmatrix_trans(pack_pair(s[n][0], s[n][1], Math()));
            p[n][1] = movmatrix_trans(pack_pair(s[n][2], s[n][3], Math()));
        }
        // ---- output; the weights' own sum as the product with a V of ones
        const unsigned int one = pair_of_ones(Math()), ones[4] = {one, one, one, one};
#pragma unroll
        for (int n = 0; n < TILES; n++) mma_m16n8k16(w[n], ones, p[n], Math());
        const unsigned char* v = page + PAGE * CHUNKS * 16;
        const int v_row = lane % 8 + lane / 16 * 8, v_chunk = lane / 8 % 2;
#pragma unroll
        for (int e = 0; e < D / 16; e += F::N) {
            unsigned int a[F::N][4];
            F::values(a, v + page_offset<CHUNKS>(v_row, 2 * e / F::N + v_chunk));
#pragma unroll
            for (int i = 0; i < F::N; i++)
#pragma unroll
                for (int n = 0; n < TILES; n++)
                    mma_m16n8k16(acc[n][e + i], a[i], p[n], Math());
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
                    node[4 + 16 * e + F::out_column(lane / 4, 0)] = acc[n][e][h];
                    node[4 + 16 * e + F::out_column(lane / 4, 1)] = acc[n][e][h + 2];
                }
                if (lane < 4)
                    *reinterpret_cast<float4*>(node) = make_float4(m[n][h], l[n][h], w[n][h], 0.0f);
            }
    }
};
