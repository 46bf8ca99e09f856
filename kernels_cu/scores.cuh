#pragma once
// Options of paged_split_k_mma, each compiled only where it is used, and what they make of a score:
//
//   score = q . k * scale,  then cap * tanh(score / cap),  then + slope * (key - newest key)
//
// The window is a matter of which keys are read (schedule.cuh, kv_ring.cuh), sinks and the factor
// of V of the final division; blocks and overlap do not touch scores.
#include "softmax_state.cuh"

constexpr int SOFT_CAP = 1;      // logits soft cap
constexpr int ALIBI = 2;         // a slope per query head
constexpr int WINDOW = 4;        // only the newest keys are visible
constexpr int SINKS = 8;         // an extra logit per query head
constexpr int SCALES = 16;       // a factor of V, and factors by sequence or KV head
constexpr int ANY_BLOCK = 32;    // blocks that are no multiples of a page: a table entry per key
constexpr int OVERLAP = 64;      // starts before the launch before it has ended
constexpr int BLOCK_PARTS = 128; // blocks of several pages

// Of the unit at work: the heads 2t, 2t + 1 of each of TILES tiles of 8.
template <int OPTIONS, int TILES>
struct Scores {
    static constexpr bool CAPPED = OPTIONS & SOFT_CAP, BIASED = OPTIONS & ALIBI;

    float scale;                 // of what `of` returns, to log2 units
    float inner, cap;            // CAPPED, BIASED: of the product; of what tanh returns
    float slopes[TILES][2];      // BIASED

    // scale_of_unit: times the product. alibi_slopes: of the first of `heads` query heads.
    __device__ __forceinline__ void load(float scale_of_unit, float soft_cap,
                                         const float* alibi_slopes, int heads) {
        if constexpr (CAPPED)
            inner = scale_of_unit / soft_cap, cap = soft_cap;
        else
            inner = scale_of_unit, cap = 1.0f;
        scale = (BIASED ? 1.0f : CAPPED ? cap : inner) * LOG2_E;
        if constexpr (BIASED)
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    slopes[n][h] =
                        __ldg(alibi_slopes + min(n * 8 + threadIdx.x % 4 * 2 + h, heads - 1));
    }

    // The score of product x, but for the factor `scale`. distance: key - newest key.
    __device__ __forceinline__ float of(float x, int n, int h, int distance) const {
        if constexpr (CAPPED) x = tanhf(x * inner);
        if constexpr (BIASED)
            x = fmaf(slopes[n][h], (float)distance, x * (CAPPED ? cap : inner));
        return x;
    }
};
