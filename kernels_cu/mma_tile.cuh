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

    // PAGES more pages, `keys` of whose rows hold a key; WINDOW: those before row `hidden` are not
    // visible. A warp waits for most of what it does here, so that two pages at once take little
    // longer than one; the sums are those of one after the other.
    template <int PAGES, typename T, int OPTIONS>
    __device__ __forceinline__ void add(const unsigned char* const (&pages)[PAGES],
                                        const QueryTile<T, TKV, D, TILES>& q, int keys, int hidden,
                                        const Scores<OPTIONS, TILES>& scores) {
        constexpr int CHUNKS = D * sizeof(TKV) / 16;
        const int lane = threadIdx.x % 32;
        // ---- scores; two chains of sums, of one tile or two, halve the wait for the tensor cores
        constexpr bool PARTED = TILES == 1;
        float s[PAGES][TILES][4] = {}, odd[PAGES][TILES][4] = {};
        const int k_row = lane % 16, k_chunk = lane / 16;
#pragma unroll
        for (int j = 0; j < D / 16; j += F::N)
#pragma unroll
            for (int r = 0; r < PAGES; r++) {
                unsigned int a[F::N][4];
                F::keys(a, pages[r] + page_offset<CHUNKS>(k_row, 2 * j / F::N + k_chunk));
#pragma unroll
                for (int i = 0; i < F::N; i++)
#pragma unroll
                    for (int n = 0; n < TILES; n++)
                        mma_m16n8k16(PARTED && (j + i) % 2 ? odd[r][n] : s[r][n], a[i],
                                     q.bits[n][j + i], Math());
            }
        // ---- softmax: the maximum is an integer, so f is a power of two
        float f[PAGES][TILES][2];
        unsigned int p[PAGES][TILES][2];
#pragma unroll
        for (int r = 0; r < PAGES; r++) {
            bool there[2];       // whether the keys of rows g, g + 8 are visible
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = r * PAGE + i * 8 + lane / 4;
                there[i] = row < keys && (!(OPTIONS & WINDOW) || row >= hidden);
            }
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                float (&x)[4] = s[r][n];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if constexpr (PARTED) x[i] += odd[r][n][i];
                    if constexpr (QueryTile<T, TKV, D, TILES>::SCALED) x[i] *= q.unit[n][i % 2];
                    x[i] = scores.of(x[i], n, i % 2,
                                     r * PAGE + lane / 4 + i / 2 * 8 + 1 - keys);
                }
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float top = fmaxf(there[0] ? x[h] * scores.scale : neg_inf(),
                                      there[1] ? x[h + 2] * scores.scale : neg_inf());
#pragma unroll
                    for (int step = 4; step < 32; step *= 2)
                        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
                    const float M = fmaxf(m[n][h], ceilf(top)), base = M == neg_inf() ? 0.0f : -M;
                    f[r][n][h] = exact_weight(m[n][h], M);
                    m[n][h] = M;
                    // Fused: a product rounded first would cost large scores their low bits. A key
                    // that is not there weighs -0, which added to a -0 leaves it.
                    x[h] = there[0] ? ex2(fmaf(x[h], scores.scale, base)) : -0.0f;
                    x[h + 2] = there[1] ? ex2(fmaf(x[h + 2], scores.scale, base)) : -0.0f;
                    l[n][h] = l[n][h] * f[r][n][h] + (x[h] + x[h + 2]);
                }
                // [key][head] fragments become [head][key] ones
                p[r][n][0] = movmatrix_trans(pack_pair(x[0], x[1], Math()));
                p[r][n][1] = movmatrix_trans(pack_pair(x[2], x[3], Math()));
            }
        }
        // ---- output; the weights' own sum as the product with a V of ones
        const unsigned int one = pair_of_ones(Math()), ones[4] = {one, one, one, one};
        const int v_row = lane % 8 + lane / 16 * 8, v_chunk = lane / 8 % 2;
#pragma unroll
        for (int r = 0; r < PAGES; r++) {
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                if (f[r][n][0] != 1.0f || f[r][n][1] != 1.0f) {    // rare after a few pages
#pragma unroll
                    for (int e = 0; e < D / 16; e++)
#pragma unroll
                        for (int i = 0; i < 4; i++) acc[n][e][i] *= f[r][n][i % 2];
#pragma unroll
                    for (int i = 0; i < 4; i++) w[n][i] *= f[r][n][i % 2];
                }
                mma_m16n8k16(w[n], ones, p[r][n], Math());
            }
            const unsigned char* v = pages[r] + PAGE * CHUNKS * 16;
#pragma unroll
            for (int e = 0; e < D / 16; e += F::N) {
                unsigned int a[F::N][4];
                F::values(a, v + page_offset<CHUNKS>(v_row, 2 * e / F::N + v_chunk));
#pragma unroll
                for (int i = 0; i < F::N; i++)
#pragma unroll
                    for (int n = 0; n < TILES; n++)
                        mma_m16n8k16(acc[n][e + i], a[i], p[r][n], Math());
            }
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
