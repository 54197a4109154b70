// The sum of the ranks' rows, a block at a time: shared by reduce and reduce_adamw.
#pragma once

#include "cuda/vector.cuh"
#include "ops.h"

namespace zshard::cuda {

// What a block of elements, or all of them, come to.
struct Partial {
    double sum;  // of squares
    bool bad;    // some value is not finite
};

static_assert(kSquareColumns == kThreads);
inline constexpr int kRow = kSquareColumns * kSquareGroup;

inline constexpr int kWarp = 32;  // threads

// sums[0], sums[kWarp], ... of kWarps warps added by halving, from the kStep-th of them on.
template <int kWarps, int kStep = 1>
__device__ double halve_warps(const double* sums) {
    if constexpr (kStep == kWarps) {
        return *sums;
    } else {
        return halve_warps<kWarps, 2 * kStep>(sums) +
               halve_warps<kWarps, 2 * kStep>(sums + kStep * kWarp);
    }
}

// Adds sums[0 .. kWarps * kWarp), one a thread of the block, by halving. The first warp calls this,
// behind a barrier, and its first thread gets the sum: the others need not wait for it.
template <int kWarps>
__device__ double halve(const double* sums) {
    double sum = halve_warps<kWarps>(sums + threadIdx.x);
#pragma unroll
    for (int half = kWarp / 2; half > 0; half /= 2) sum += __shfl_down_sync(~0u, sum, half);
    return sum;
}

// The group of elements that starts at `i`; those from `numel` on are 0.
template <bool kWhole, typename T>
__device__ Vector<T, kSquareGroup> load_group(const T* p, int64_t i, int64_t numel, bool aligned) {
    if (kWhole || i + kSquareGroup <= numel) return load<kSquareGroup>(p + i, kWhole || aligned);
    Vector<T, kSquareGroup> group{};
#pragma unroll
    for (int k = 0; k < kSquareGroup; ++k)
        if (i + k < numel) group.values[k] = p[i + k];
    return group;
}

// Where a thread's groups of a block begin: one a row.
__device__ inline int64_t place(int row) {
    return int64_t{row * kRow} + threadIdx.x * kSquareGroup;
}

// What a thread adds up of a block's squares: its rows, then its group. [Note: sum of squares]
template <typename W>
class Squares {
 public:
    __device__ void add(int row, int k, double x) {
        if constexpr (kOverflows) bad_ |= !isfinite(x);
        sums_[k] = row == 0 ? x * x : sums_[k] + x * x;
    }

    __device__ Partial partial() const {
        static_assert(kSquareGroup == 4);
        const double sum = (sums_[0] + sums_[2]) + (sums_[1] + sums_[3]);
        return {sum, kOverflows ? bad_ : !isfinite(sum)};
    }

 private:
    // Squares of fp32 do not overflow fp64, however many are added: their sum tells it of all.
    static constexpr bool kOverflows = sizeof(W) == sizeof(double);
    double sums_[kSquareGroup] = {};
    bool bad_ = false;
};

// Sums a block's part of the chunks in rank order, scales it and, where `add` is not null, adds it
// to what is there; hands each row's group to put(row, group), and returns the squares as far as
// this thread adds them.
// kWhole: every element of the block exists, at an aligned place. A load behind a branch is waited
// for at once; without branches those of all rows, and of two ranks, are under way together.
template <bool kWhole, typename Acc, typename Chunk, typename Put>
__device__ Partial reduce_block(const Rows& chunks, int64_t begin, int64_t numel, double scale,
                                const Acc* add, const Put& put) {
    using W = Wide<Acc>;
    W wide[kSquareRows][kSquareGroup];
#pragma unroll kWhole && sizeof(Chunk) == 2 ? 2 : 1
    for (int64_t rank = 0; rank < chunks.count; ++rank) {
        const Chunk* chunk = chunks.row<Chunk>(rank) + begin;
        const bool aligned = is_aligned<kSquareGroup>(chunk);
        Vector<Chunk, kSquareGroup> loaded[kSquareRows];
#pragma unroll
        for (int row = 0; row < kSquareRows; ++row)
            loaded[row] = load_group<kWhole>(chunk, place(row), numel - begin, aligned);
#pragma unroll
        for (int row = 0; row < kSquareRows; ++row)
#pragma unroll
            for (int k = 0; k < kSquareGroup; ++k) {
                const W value = convert<W>(loaded[row].values[k]);
                wide[row][k] = rank == 0 ? value : wide[row][k] + value;
            }
    }
    Squares<W> squares;
    Vector<Acc, kSquareGroup> stored[kSquareRows] = {};
    if (add != nullptr) {
        const bool aligned = is_aligned<kSquareGroup>(add + begin);
#pragma unroll
        for (int row = 0; row < kSquareRows; ++row)
            stored[row] = load_group<kWhole>(add + begin, place(row), numel - begin, aligned);
    }
#pragma unroll
    for (int row = 0; row < kSquareRows; ++row) {
        Acc* values = stored[row].values;
#pragma unroll
        for (int k = 0; k < kSquareGroup; ++k) {
            const W value = wide[row][k] * static_cast<W>(scale);
            values[k] = convert<Acc>(add != nullptr ? convert<W>(values[k]) + value : value);
            if (!kWhole && begin + place(row) + k >= numel) values[k] = Acc{};
            squares.add(row, k, convert<W>(values[k]));
        }
        put(row, stored[row]);
    }
    return squares.partial();
}

// The squares alone, of a block of values that stay as they are.
template <bool kWhole, typename T>
__device__ Partial measure_block(const T* values, int64_t begin, int64_t numel) {
    using W = Wide<T>;
    const bool aligned = is_aligned<kSquareGroup>(values + begin);
    Vector<T, kSquareGroup> loaded[kSquareRows];
#pragma unroll
    for (int row = 0; row < kSquareRows; ++row)
        loaded[row] = load_group<kWhole>(values + begin, place(row), numel - begin, aligned);
    Squares<W> squares;
#pragma unroll
    for (int row = 0; row < kSquareRows; ++row)
#pragma unroll
        for (int k = 0; k < kSquareGroup; ++k)
            squares.add(row, k, convert<W>(loaded[row].values[k]));
    return squares.partial();
}

// Adds up what the threads of a block have, once, and leaves it in `partials`, unless that is null.
__device__ inline void record(Partial mine, Partial* partials) {
    __shared__ double sums[kSquareColumns];
    if (partials == nullptr) return;
    sums[threadIdx.x] = mine.sum;
    const bool bad = __syncthreads_or(mine.bad);
    if (threadIdx.x >= kWarp) return;
    const double sum = halve<kSquareColumns / kWarp>(sums);
    if (threadIdx.x == 0) partials[blockIdx.x] = {sum, bad};
}

// stats (2,) from those of all blocks.
void finish_stats(const char* op, const Partial* partials, int64_t blocks, double* stats);

}  // namespace zshard::cuda
